# SPDX-License-Identifier: Apache-2.0
"""Behind a proxy: whatever ``--root-path`` is, a route that answers has its budgets, report and key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket

from h2o_vllm.server import playground
from h2o_vllm.server.routes import route_path
from tests.server.vllm_like import Engine, build, client_of

ROOTS = ["", "/", "/x", "/x/", "x", "x/", "//", "/x/y", "/v1"]
SENT = ["", "/x", "/x/", "/x/y", "//"]
"""What stands in front of a route's path in a request: a proxy may strip its prefix or leave it."""


def application(root: str, **state: object) -> FastAPI:
    app = build(Engine(), **state)
    app.root_path = root

    @app.get("/health")
    async def health() -> str:
        return "well"

    return app


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("path", ["/v1/completions", "/xv1", "/x", "/", "", "/health", "/h2o/"])
def test_paths_are_cut_as_starlette_cuts_them(root: str, path: str) -> None:
    from starlette._utils import get_route_path

    for sent in SENT:
        scope = {"type": "http", "path": sent + path, "root_path": root}
        assert route_path(scope) == get_route_path(scope)
    assert route_path({"path": path}) == path


@pytest.mark.asyncio
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("sent", SENT)
async def test_a_route_that_answers_takes_budgets_and_reports(root: str, sent: str) -> None:
    path = f"{sent}/v1/completions"
    async with client_of(application(root)) as client:
        good = await client.post(path, json={"prompt": "p", "kv_budget": 0.2})
        bad = await client.post(path, json={"prompt": "p", "kv_budget": 7})
    assert good.status_code in (200, 404)
    if good.status_code == 200:
        assert "kv_cache" in good.json()
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "kv_budget")


@pytest.mark.asyncio
@pytest.mark.parametrize("root", ROOTS)
async def test_health_needs_no_key_and_all_else_does(root: str) -> None:
    app = application(root, args=SimpleNamespace(api_key=["k"], kv_playground=True))
    playground.attach(app)
    async with client_of(app) as client:
        for sent in SENT:
            healthy = await client.get(f"{sent}/health")
            # A path that is no route is closed, like all that is not known to be open.
            assert healthy.status_code in (200, 401)
            assert (await client.post(f"{sent}/v1/completions", json={})).status_code == 401
        key = httpx.BasicAuth("anyone", "k")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/h2o/")).headers["www-authenticate"].startswith("Basic")
        assert (await client.get("/h2o/", auth=key)).status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("root", ROOTS)
async def test_a_websocket_needs_the_key_as_well(root: str) -> None:
    """vLLM (0.32) looks for ``/v1`` in what is left of the path, and with ``/`` as root path finds none."""
    app = application(root, args=SimpleNamespace(api_key=["k"]))

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()

    async def first_answer(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
        said: list[Any] = []

        async def receive() -> dict[str, str]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            said.append(message)

        scope = {"type": "websocket", "path": path, "query_string": b"", "headers": headers}
        await app(scope, receive, send)
        return dict(said[0])

    for sent in SENT:
        path = f"{sent}/v1/realtime"
        assert (await first_answer(path))["status"] == 401
        known = await first_answer(path, (b"authorization", b"Bearer k"))
        # A path that is no route is closed.
        assert known["type"] in ("websocket.accept", "websocket.close")
        assert known["type"] == "websocket.accept" or sent or root == "/v1"
