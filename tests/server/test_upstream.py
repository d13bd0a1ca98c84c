# SPDX-License-Identifier: Apache-2.0
"""What the server relies on in vLLM; a new vLLM that breaks it fails here first, by name."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import pytest

from h2o_vllm.server.protocol import VLLM_FIELDS, XARGS
from h2o_vllm.server.routes import LIFTED, PREPARED, REFUSED, UNTOUCHED, Rule, rule_for
from h2o_vllm.server.shutdown_log import ShutdownFilter
from h2o_vllm.server.system_part import RENDERED


def literals(kind: Any) -> list[str]:
    """The strings of a ``Literal`` or of a union of them."""
    nested = [(get_args(each) and literals(each)) or [each] for each in get_args(kind)]
    return [text for part in nested for text in part]


@pytest.fixture(scope="module")
def post_paths() -> set[str]:
    """Every POST route of a vLLM server that does everything it can."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.tasks import SupportedTask

    from h2o_vllm.server.cli import build_parser

    args = build_parser().parse_args([])
    args.enable_scale_out = args.enable_fault_tolerance = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        app = build_app(args, tuple(literals(SupportedTask)), None)
    return {route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())}


def test_every_post_route_is_classified(post_paths: set[str]) -> None:
    assert len(post_paths) > 30
    assert post_paths - LIFTED - PREPARED - REFUSED - UNTOUCHED == set()
    assert post_paths >= LIFTED | PREPARED


def test_no_route_is_classified_twice() -> None:
    sets = (LIFTED, PREPARED, REFUSED, UNTOUCHED)
    assert sum(map(len, sets)) == len(frozenset().union(*sets))


def test_rules() -> None:
    assert rule_for("POST", "/v1/completions") is Rule.LIFT
    assert rule_for("POST", "/v1/messages") is Rule.LIFT
    assert rule_for("POST", "/v1/completions/render") is Rule.PREPARE
    assert rule_for("POST", "/generative_scoring") is Rule.REFUSE
    assert rule_for("POST", "/tokenize") is None
    assert rule_for("GET", "/v1/completions") is None


def test_fields_of_vllm_that_look_like_ours_are_known() -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    requests = (
        AnthropicMessagesRequest,
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
    )
    for request in requests:
        assert {name for name in request.model_fields if name.startswith("kv_")} <= VLLM_FIELDS
        assert XARGS in request.model_fields


def test_outputs_carry_what_the_tap_takes() -> None:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    assert "kv_transfer_params" in inspect.signature(RequestOutput).parameters
    assert "kv_transfer_params" in EngineCoreOutput.__struct_fields__
    assert inspect.isasyncgenfunction(AsyncLLM.generate)


def test_what_decides_how_a_chat_begins_are_fields_of_its_request() -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    requests = {
        "chat": ChatCompletionRequest,
        "responses": ResponsesRequest,
        "messages": AnthropicMessagesRequest,
    }
    for kind, request in requests.items():
        assert set(RENDERED[kind]) <= set(request.model_fields)
        assert ("input" if kind == "responses" else "messages") in request.model_fields


def test_chats_can_be_rendered_without_being_served() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.scale_out import factories
    from vllm.entrypoints.scale_out.render.serving import ServingRender

    assert "state.serving_render = ServingRender(" in inspect.getsource(factories)
    for kind in ("chat", "responses", "messages"):
        assert inspect.iscoroutinefunction(getattr(ServingRender, f"render_{kind}_request"))
    # Prompt and parameters first, and before a streamed answer has begun.
    source = inspect.getsource(OpenAIServingChat._create_chat_completion)
    call = source.index("self.engine_client.generate(")
    assert source[call:].split()[1:3] == ["engine_input,", "sampling_params,"]
    assert call < source.index("if request.stream:")


def test_one_api_server_starts_as_vllms_run_server_does() -> None:
    from vllm.entrypoints.launchers.api_server import entry

    source = inspect.getsource(entry.run_server)
    assert "listen_address, sock = setup_server(args, reuse_port=False)" in source
    assert "await run_server_worker(listen_address, sock, args, **uvicorn_kwargs)" in source


def test_loggers_of_the_shutdown_have_the_names_we_filter() -> None:
    from vllm.entrypoints.launchers import launcher
    from vllm.v1.engine import async_llm

    assert launcher.logger.name == ShutdownFilter.START
    assert async_llm.logger.name == ShutdownFilter.NOISE
    assert "[shutdown]" in inspect.getsource(launcher.serve_http)


def test_engine_of_one_server_is_started_as_ours_starts_it() -> None:
    """``launch`` and ``engine_start`` do what these do, but for how the engine's process is made."""
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils.system_utils import get_mp_context

    worker, client = map(
        inspect.getsource, (entry.run_server_worker, entry.build_async_engine_client)
    )
    for step in (
        "ToolParserManager.import_tool_parser(",
        "ReasoningParserManager.import_reasoning_parser(",
    ):
        assert step in worker
    assert "build_and_serve(\n            engine_client, listen_address, sock, args," in worker
    assert "AsyncEngineArgs.from_cli_args(args)" in client
    assert "propagate_flash_late_interaction(args, engine_args)" in client
    # The context is Python's own, whose processes come from the fork server while the engine starts.
    assert '"VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"' in inspect.getsource(CpuPlatform)
    assert "multiprocessing.get_context(mp_method)" in inspect.getsource(get_mp_context)


def test_failed_starts_are_logged_as_they_are_recorded() -> None:
    import importlib

    from h2o_vllm.engine.start_record import FAILED

    for name, message in FAILED.items():
        assert f'logger.exception("{message}")' in inspect.getsource(importlib.import_module(name))


def test_model_classes_that_cannot_be_imported_are_logged_as_they_are_kept() -> None:
    from vllm.model_executor.models import registry

    from h2o_vllm.engine.start_record import INSPECTION

    name, message = INSPECTION
    source = inspect.getsource(registry)
    assert name == registry.__name__
    assert f'logger.exception("{message}", model_arch)' in source
    assert '"to be inspected. Please check the logs' in source
