# SPDX-License-Identifier: Apache-2.0
"""The layer around vLLM's application, on an application built like vLLM's."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

import h2o_vllm
from h2o_vllm.server import engine_death
from tests.server.conftest import engine_report
from tests.server.vllm_like import Engine, build, client_of, lifespan, post, scope_of


class Call:
    """One request, driven by hand: what was sent so far can be looked at while it runs."""

    def __init__(self, app: FastAPI, body: bytes, path: str = "/v1/completions") -> None:
        self.sent: list[Any] = []
        self.read = 0
        self.gone = asyncio.Event()
        self._chunks = [body[:5], body[5:]]
        self.task = asyncio.ensure_future(app(scope_of(path), self._receive, self._send))

    async def _receive(self) -> Any:
        if self._chunks:
            self.read += 1
            body = self._chunks.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._chunks)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body" and m["body"]]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.bodies) < count:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)


async def test_field_reaches_the_engine_as_xarg_and_the_report_the_client() -> None:
    engine = Engine()
    response = await post(build(engine), kv_budget=0.2, vllm_xargs={"mine": 1})
    assert response.status_code == 200
    assert engine.seen[0]["vllm_xargs"] == {"mine": 1, "kv_budget": 0.2}
    assert "kv_budget" not in engine.seen[0]
    body = response.json()
    assert body["kv_cache"] == engine_report(tokens_seen=4)
    assert list(body)[-1] == "kv_cache"
    assert int(response.headers["content-length"]) == len(response.content)
    assert body["kv_transfer_params"] is None
    plain = (await post(build(engine := Engine()))).json()
    assert plain["kv_cache"]["tokens_seen"] == 4
    assert engine.seen == [{"prompt": "pppp"}]


async def test_stream_is_not_held_back() -> None:
    engine = Engine(tokens=3)
    engine.allowed = 0
    call = Call(build(engine), b'{"prompt": "pppp", "stream": true}')
    for count in (1, 2):
        engine.allowed = count
        await call.until(count)
        assert len(call.bodies) == count
    engine.allowed = 3
    await call.task
    assert b"kv_cache" in b"".join(call.bodies)


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_client_that_leaves_aborts_its_stream_in_the_engine(stream: str) -> None:
    engine = Engine(tokens=2)
    engine.allowed = 1
    call = Call(build(engine), f'{{"prompt": "pppp", "stream": {stream}}}'.encode())
    if stream == "true":
        await call.until(1)
        call.gone.set()
        async with asyncio.timeout(5):
            await call.task
    else:
        while not engine.seen:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
    assert engine.aborted == 1


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/completions", {"kv_budget": 0.2}, 200),
        ("/v1/completions", {"kv_budget": 0.2, "stream": True}, 200),
        ("/v1/completions", {"kv_budget": 7}, 400),
        ("/v1/nowhere", {}, 404),
    ],
)
async def test_every_answer_says_which_version_gave_it_and_is_for_other_origins(
    path: str, fields: dict[str, Any], status: int
) -> None:
    async with client_of(build(Engine())) as client:
        body = {"model": "m", "prompt": "p", **fields}
        response = await client.post(path, json=body, headers={"origin": "http://page"})
    assert response.status_code == status
    assert response.headers.get_list("x-h2o-vllm") == [h2o_vllm.__version__]
    assert response.headers["access-control-allow-origin"] == "http://page"
    length = response.headers.get("content-length", len(response.content))
    assert int(length) == len(response.content)
    assert response.headers["content-type"].startswith(("application/json", "text/event-stream"))


async def test_unauthenticated_request_is_a_401_and_its_body_is_not_read() -> None:
    app = build(Engine(), key="secret")
    assert (await post(app, kv_budget=9)).status_code == 401
    call = Call(app, b'{"prompt": "p", "kv_budget": 9}')
    await call.task
    assert call.sent[0]["status"] == 401
    assert call.read == 0


async def test_other_requests_are_untouched() -> None:
    app = build(Engine())
    response = await post(app, "/tokenize")
    assert json.loads(response.json()["body"]) == {"prompt": "pppp"}
    for path in ("/generative_scoring", "/tokenize"):
        refused = await post(app, path, kv_budget=0.2)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_budget")
    async with client_of(app) as client:
        assert (await client.get("/v1/completions")).status_code == 405
        assert (await client.get("/openapi.json")).status_code == 200
        assert (await client.post("/nowhere", json={"kv_budget": 9})).status_code == 404


@pytest.mark.parametrize("broken", ["config", "client", "key", "engine"])
async def test_start_fails_loudly_on_an_application_that_cannot_be_served(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_death.ending, "refusal", None)
    app = build(Engine())
    if broken == "config":
        app.state.vllm_config.additional_config["h2o"]["kv_budget"] = 7
    elif broken == "client":
        app.state.engine_client = SimpleNamespace(
            logger_manager=None, collective_rpc=Engine().collective_rpc
        )
    elif broken == "engine":
        app.state.engine_client.refusal = "--kv-budget is 0.2 here and 0.5 there"
    else:
        app.state.vllm_config.additional_config = {}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert engine_death.ending.refusal == sent[0]["message"]
    assert broken != "client" or "generate" in sent[0]["message"]
    assert broken != "engine" or "0.2 here and 0.5 there" in sent[0]["message"]


@pytest.mark.parametrize(
    ("errored", "told_to_stop", "died"),
    [(False, False, False), (True, False, True), (True, True, False), (False, True, False)],
)
async def test_only_an_engine_that_nobody_stopped_has_died(
    errored: bool, told_to_stop: bool, died: bool
) -> None:
    """What the command makes of it: ``test_short_pool.py``."""
    engine = Engine()
    engine.errored = errored
    await lifespan(build(engine), told_to_stop=told_to_stop)
    assert engine_death.ending.died is died
