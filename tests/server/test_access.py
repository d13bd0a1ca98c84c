# SPDX-License-Identifier: Apache-2.0
"""``--api-key`` covers everything but health and monitoring, also behind a proxy with ``--root-path``."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket

from h2o_vllm.server import access, playground
from h2o_vllm.server.access import OPEN
from h2o_vllm.server.routes import route_path
from tests.server.vllm_like import Engine, build, client_of

CLOSED = [
    ("POST", "/v1/completions"),
    ("POST", "/invocations"),
    ("POST", "/tokenize"),
    ("GET", "/plugins/h2o/config"),
    ("GET", "/a/route/of/tomorrow"),
    ("POST", "//v1/completions"),
    ("POST", "/healthy"),
    ("GET", "/health/../v1/models"),
    ("GET", "/metrics/../invocations"),
]
ROOTS = ["", "/", "/x", "/x/", "x", "x/", "//", "/x/y", "/v1"]
SENT = ["", "/x", "/x/", "/x/y", "//"]
"""What stands in front of a route's path in a request: a proxy may strip its prefix or leave it."""


def application(keys: list[str] | None, root: str = "") -> FastAPI:
    app = build(Engine(), args=SimpleNamespace(api_key=keys, kv_playground=True))
    app.root_path = root

    @app.get("/health")
    async def health() -> str:
        return "well"

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()

    return app


async def ask(method: str, path: str, keys: list[str] | None, sent: str | None) -> int:
    headers = {} if sent is None else {"authorization": sent}
    async with client_of(application(keys)) as client:
        # As it stands: httpx would resolve the dots.
        request = client.build_request(method, "/", json={"prompt": "p"}, headers=headers)
        request.url = request.url.copy_with(raw_path=path.encode())
        return (await client.send(request)).status_code


@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_closed_without_the_key(method: str, path: str) -> None:
    for sent in (None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic a", "a"):
        assert await ask(method, path, ["a", "b"], sent) == 401
    for keys in (None, [], [""]):
        assert await ask(method, path, keys, None) != 401


async def test_any_of_the_keys_opens_and_health_and_preflights_need_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for sent in ("Bearer a", "Bearer b", "bearer a"):
        assert await ask("POST", "/v1/completions", ["a", "b"], sent) == 200
        assert await ask("POST", "/tokenize", ["a", "b"], sent) == 200
    assert await ask("GET", "/health", ["a"], None) == 200
    assert await ask("OPTIONS", "/v1/completions", ["a"], None) != 401
    monkeypatch.setattr(access, "envs", SimpleNamespace(VLLM_API_KEY="secret"))
    assert await ask("POST", "/tokenize", None, None) == 401
    assert await ask("POST", "/tokenize", None, "Bearer secret") == 200


def test_open_routes_are_those_that_vllm_leaves_open_too() -> None:
    from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

    assert not any(path.startswith(GUARDED_PREFIX) for path in OPEN)


@pytest.mark.parametrize("root", ROOTS)
def test_paths_are_cut_as_starlette_cuts_them(root: str) -> None:
    from starlette._utils import get_route_path

    for path in ("/v1/completions", "/xv1", "/x", "/", "", "/health", "/h2o/"):
        for sent in SENT:
            scope = {"type": "http", "path": sent + path, "root_path": root}
            assert route_path(scope) == get_route_path(scope)
        assert route_path({"path": path}) == path


@pytest.mark.parametrize("root", ROOTS)
async def test_behind_a_proxy_a_route_that_answers_has_its_key_budgets_and_report(
    root: str,
) -> None:
    app = application(["k"], root)
    playground.attach(app)
    async with client_of(app) as client:
        for sent in SENT:
            path, key = f"{sent}/v1/completions", {"authorization": "Bearer k"}
            # A path that is no route is closed, like all that is not known to be open.
            assert (await client.get(f"{sent}/health")).status_code in (200, 401)
            assert (await client.post(path, json={})).status_code == 401
            good = await client.post(path, json={"prompt": "p", "kv_budget": 0.2}, headers=key)
            bad = await client.post(path, json={"prompt": "p", "kv_budget": 7}, headers=key)
            assert good.status_code in (200, 404)
            if good.status_code == 200:
                assert "kv_cache" in good.json()
                assert (bad.status_code, bad.json()["error"]["param"]) == (400, "kv_budget")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/h2o/")).headers["www-authenticate"].startswith("Basic")
        page = await client.get("/h2o/", auth=httpx.BasicAuth("anyone", "k"))
        assert page.status_code == 200


@pytest.mark.parametrize("root", ROOTS)
async def test_a_websocket_needs_the_key_as_well(root: str) -> None:
    """vLLM (0.32) looks for ``/v1`` in what is left of the path, and with ``/`` as root path finds none."""
    app = application(["k"], root)

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
        assert known["type"] in ("websocket.accept", "websocket.close")
        assert known["type"] == "websocket.accept" or sent or root == "/v1"
