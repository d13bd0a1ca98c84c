# SPDX-License-Identifier: Apache-2.0
"""Behind a proxy: whatever ``--root-path`` is, a route that answers has its budgets, report and key."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

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
