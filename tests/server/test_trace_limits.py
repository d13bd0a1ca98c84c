# SPDX-License-Identifier: Apache-2.0
"""Who may ask for a trace, and how many at a time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server.protocol import RefusalError
from h2o_vllm.server.trace_limits import FIELD, MAX_TRACES, TraceSlots
from tests.server.test_middleware import Call
from tests.server.vllm_like import Engine, build, post

CHAT = "/v1/chat/completions"


def refusal(path: str = CHAT, **request: Any) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        TraceSlots().take(path, request)
    return caught.value


def test_a_trace_is_of_one_sequence() -> None:
    for path in ("/v1/messages", "/v1/responses", "/invocations", f"{CHAT}/batch"):
        said = f"kv_trace is not supported by {path}; it is by {CHAT}, /v1/completions"
        assert refusal(path).message == said
    slots = TraceSlots()
    for prompt in ("a", ["a"], [1, 2, 3], [[1, 2, 3]]):
        slots.take("/v1/completions", {"prompt": prompt})
    for several in (["a", "b"], [[1], [2]]):
        assert "several prompts" in refusal("/v1/completions", prompt=several).message


@pytest.mark.asyncio
async def test_a_place_is_free_again_when_an_answer_has_ended_or_its_reader_has_gone() -> None:
    engine = Engine()
    engine.allowed = 0
    app = build(engine, H2OConfig(kv_trace=True))
    body = {"prompt": "p", "kv_trace": True}
    waiting = [Call(app, json.dumps(body | {"stream": True}).encode()) for _ in range(MAX_TRACES)]
    while len(engine.seen) < MAX_TRACES:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0)
    full = await post(app, **body)
    error = full.json()["error"]
    assert (full.status_code, error["code"], error["param"]) == (429, 429, FIELD)
    assert "try again later" in error["message"]
    waiting[0].gone.set()
    await asyncio.gather(waiting[0].task, return_exceptions=True)
    engine.allowed = engine.tokens
    assert (await post(app, **body)).status_code == 200
    await asyncio.gather(*[call.task for call in waiting[1:]])
    for _ in range(MAX_TRACES + 1):
        assert (await post(app, **body)).status_code == 200
        assert (await post(app, **body | {"prompt": ["p", "q"]})).status_code == 400
