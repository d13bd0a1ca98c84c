# SPDX-License-Identifier: Apache-2.0
"""``--api-key`` covers everything but health and monitoring."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from h2o_vllm.server import access
from h2o_vllm.server.access import OPEN
from tests.server.vllm_like import Engine, build

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


async def ask(method: str, path: str, keys: list[str] | None, sent: str | None) -> int:
    app = build(Engine(), args=SimpleNamespace(api_key=keys))

    @app.get("/health")
    async def health() -> str:
        return "well"

    headers = {} if sent is None else {"authorization": sent}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        # As it stands: httpx would resolve the dots.
        request = client.build_request(method, "/", json={"prompt": "p"}, headers=headers)
        request.url = request.url.copy_with(raw_path=path.encode())
        return (await client.send(request)).status_code


@pytest.mark.asyncio
@pytest.mark.parametrize(("method", "path"), CLOSED)
@pytest.mark.parametrize("sent", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic a", "a"])
async def test_closed_without_the_key(method: str, path: str, sent: str | None) -> None:
    assert await ask(method, path, ["a", "b"], sent) == 401


@pytest.mark.asyncio
@pytest.mark.parametrize("sent", ["Bearer a", "Bearer b", "bearer a"])
async def test_open_with_any_of_the_keys(sent: str) -> None:
    assert await ask("POST", "/v1/completions", ["a", "b"], sent) == 200
    assert await ask("POST", "/tokenize", ["a", "b"], sent) == 200


@pytest.mark.asyncio
async def test_health_and_preflights_need_no_key() -> None:
    assert await ask("GET", "/health", ["a"], None) == 200
    assert await ask("OPTIONS", "/v1/completions", ["a"], None) != 401


@pytest.mark.asyncio
@pytest.mark.parametrize("keys", [None, [], [""]])
async def test_without_a_key_everything_is_open(keys: list[str] | None) -> None:
    for method, path in CLOSED:
        assert await ask(method, path, keys, None) != 401


@pytest.mark.asyncio
async def test_key_from_the_environment_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "envs", SimpleNamespace(VLLM_API_KEY="secret"))
    assert await ask("POST", "/tokenize", None, None) == 401
    assert await ask("POST", "/tokenize", None, "Bearer secret") == 200


def test_open_routes_are_those_that_vllm_leaves_open_too() -> None:
    from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

    assert not any(path.startswith(GUARDED_PREFIX) for path in OPEN)
