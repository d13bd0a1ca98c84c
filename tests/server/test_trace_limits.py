# SPDX-License-Identifier: Apache-2.0
"""Who may ask for a trace, and how many at a time."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server import trace_limits
from h2o_vllm.server.protocol import RefusalError, error_body
from h2o_vllm.server.trace_limits import FIELD, MAX_TRACES, TraceSlots, install
from tests.server.test_middleware import Call
from tests.server.vllm_like import Engine, build, post

CHAT = "/v1/chat/completions"
PROMPT = {"type": "token", "prompt_token_ids": list(range(100))}


def refusal(path: str = CHAT, **request: Any) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        TraceSlots().take(path, request)
    return caught.value


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/invocations", f"{CHAT}/batch"])
def test_routes_whose_answers_are_several_are_refused(path: str) -> None:
    assert refusal(path).message == (
        f"kv_trace is not supported by {path}; it is by {CHAT}, /v1/completions"
    )


def test_one_prompt_is_a_text_or_a_list_of_tokens() -> None:
    slots = TraceSlots()
    for prompt in ("a", ["a"], [1, 2, 3], [[1, 2, 3]]):
        slots.take("/v1/completions", {"prompt": prompt})
    for prompt in (["a", "b"], [[1], [2]]):
        assert "several prompts" in refusal("/v1/completions", prompt=prompt).message


def test_more_than_a_few_at_a_time_wait() -> None:
    slots = TraceSlots()
    for _ in range(MAX_TRACES):
        slots.take(CHAT, {})
    with pytest.raises(RefusalError, match="try again later") as caught:
        slots.take(CHAT, {})
    assert caught.value.status == 429
    assert json.loads(error_body(caught.value))["error"]["code"] == 429
    slots.give_back()
    slots.take(CHAT, {})


def limited() -> Any:
    """An engine client, and what has reached it."""
    client = SimpleNamespace(seen=[])
    client.generate = lambda *args, **kwargs: client.seen.append((args, kwargs))
    config = SimpleNamespace(max_model_len=8192, is_encoder_decoder=False)
    install(client, config)
    install(client, config)
    return client


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"n": 2}, "n above 1"),
        ({"stop": ["end"]}, "stop strings"),
        ({"max_tokens": 3997}, "more than 4096 tokens (this one's prompt and max_tokens are 4097)"),
    ],
)
def test_what_only_the_parameters_tell_is_refused_before_the_answer_begins(
    params: dict[str, Any], says: str
) -> None:
    client = limited()
    asked = SamplingParams(**params, extra_args={FIELD: True})
    with pytest.raises(VLLMValidationError) as caught:
        client.generate(PROMPT, asked, "id")
    assert says in str(caught.value) and caught.value.parameter == FIELD
    with pytest.raises(VLLMValidationError):
        client.generate(prompt=PROMPT, sampling_params=asked, request_id="id")
    assert client.seen == []
    client.generate(PROMPT, SamplingParams(**params), "id")
    client.generate(PROMPT, SamplingParams(max_tokens=3996, extra_args={FIELD: True}), "id")
    assert len(client.seen) == 2


@pytest.mark.asyncio
async def test_a_place_is_free_again_when_an_answer_has_ended_or_its_reader_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The stand-in's prompts and parameters are none of vLLM's.
    monkeypatch.setattr(trace_limits, "_check", lambda *_: None)
    engine = Engine()
    engine.allowed = 0
    app = build(engine, H2OConfig(kv_trace=True))
    body = {"prompt": "p", "kv_trace": True}
    waiting = [Call(app, json.dumps(body | {"stream": True}).encode()) for _ in range(MAX_TRACES)]
    while len(engine.seen) < MAX_TRACES:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0)
    full = await post(app, **body)
    assert full.status_code == 429 and full.json()["error"]["param"] == FIELD
    waiting[0].gone.set()
    await asyncio.gather(waiting[0].task, return_exceptions=True)
    engine.allowed = engine.tokens
    assert (await post(app, **body)).status_code == 200
    await asyncio.gather(*[call.task for call in waiting[1:]])
    for _ in range(MAX_TRACES + 1):
        assert (await post(app, **body)).status_code == 200
        assert (await post(app, **body | {"prompt": ["p", "q"]})).status_code == 400
