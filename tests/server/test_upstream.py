# SPDX-License-Identifier: Apache-2.0
"""What the server relies on in vLLM; a new vLLM that breaks it fails here first, by name."""

import inspect
from typing import Any, get_args

import pytest

from h2o_vllm.server import engine_death
from h2o_vllm.server.protocol import XARGS, _meant
from h2o_vllm.server.routes import LIFTED, PREPARED, Rule, rule_for


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


def test_routes_with_budgets_are_vllms(post_paths: set[str]) -> None:
    assert post_paths >= LIFTED | PREPARED
    for method, path, rule in (
        ("POST", "/v1/messages", Rule.LIFT),
        ("POST", "/v1/completions/render", Rule.PREPARE),
        ("POST", "/one/of/a/later/vllm", Rule.REFUSE),
        ("GET", "/v1/completions", None),
    ):
        assert rule_for(method, path) is rule


def test_no_field_of_vllms_is_taken_for_ours_and_chats_begin_with_what_we_know() -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.render.serving import ServingRender

    chats = {
        "chat": ChatCompletionRequest,
        "responses": ResponsesRequest,
        "messages": AnthropicMessagesRequest,
    }
    for request in (*chats.values(), CompletionRequest):
        assert not [name for name in request.model_fields if _meant(name)]
        assert XARGS in request.model_fields
    for kind, request in chats.items():
        assert {"chat": "tools", "responses": "instructions"}.get(
            kind, "system"
        ) in request.model_fields
        assert ("input" if kind == "responses" else "messages") in request.model_fields
        assert inspect.iscoroutinefunction(getattr(ServingRender, f"render_{kind}_request"))


def test_the_logger_of_an_engines_death_has_the_name_we_know() -> None:
    from vllm.v1.engine import async_llm

    assert async_llm.logger.name == engine_death.OF_THE_ENGINE
