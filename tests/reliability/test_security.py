# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md promises: nothing of a client's is executed, our routes read only, limits are kept."""

import asyncio
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.server.config_route import PATH
from tests.server.vllm_like import Engine, build, client_of, post

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "h2o_vllm").rglob("*.py"))

COMPILES = re.compile(r"(?<![\w.])(compile|__import__)\(")


def test_no_file_of_ours_compiles_data() -> None:
    """What ruff has no rule for. Its rules S and TID251 see eval, exec, pickles, shells and the like."""
    for file in PACKAGE:
        assert not COMPILES.search(file.read_text()), file
    assert COMPILES.search("x = compile(a)") and not COMPILES.search("re.compile(a)")


class Bomb:
    """Whoever unpickles it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_a_request_stays_one(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"), protocol=0)
    pickle.loads(pickle.dumps(Bomb(tmp_path / "works")))
    assert (tmp_path / "works").exists()
    engine = Engine()
    app = build(engine)

    async def send() -> None:
        async with client_of(app) as client:
            for path in ("/v1/completions", "/v1/messages", "/tokenize"):
                for kind in ("application/json", "application/x-python-pickle", "text/plain"):
                    await client.post(path, content=bomb, headers={"content-type": kind})
            for field in ("kv_budget", "kv_policy", "kv_recent", "kv_budget_tokens"):
                body = {"prompt": "p", field: bomb.decode("ascii")}
                assert (await client.post("/v1/completions", json=body)).status_code == 400

    asyncio.run(send())
    assert not (tmp_path / "exploded").exists()
    assert engine.seen == []


def test_our_routes_only_read() -> None:
    """What our layer adds to vLLM's application."""

    async def ask() -> dict[str, int]:
        app = build(Engine())
        before = {route.path for route in app.routes}
        async with client_of(app) as client:
            methods = ("GET", "POST", "PUT", "PATCH", "DELETE")
            answers = {m: (await client.request(m, PATH)).status_code for m in methods}
        added = {route.path for route in app.routes} - before
        assert added == {PATH}
        return answers

    answers = asyncio.run(ask())
    assert answers.pop("GET") == 200
    assert set(answers.values()) == {405}


LIMITS = H2OConfig(kv_budget=0.3, kv_budget_min=0.2, kv_budget_max=0.5, kv_min_tokens=16)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        # Half of the tokens at most, a fifth at least, beside the first, protected one.
        ({"kv_budget_tokens": 2**31 - 1}, 501),
        ({"kv_budget_tokens": 1}, 201),
        ({"kv_budget": 0.5}, 501),
        ({"kv_budget": 0.2}, 201),
        ({"kv_budget": 0.51}, None),
        ({"kv_budget": 0.19}, None),
        ({"kv_budget": 1}, None),
    ],
)
def test_no_request_gets_past_the_operators_limits(asked: dict[str, Any], kept: int | None) -> None:
    from h2o_vllm.blocks.counts.budget import budget_tokens

    engine = Engine()
    answer = asyncio.run(post(build(engine, LIMITS), **asked))
    assert answer.status_code == (400 if kept is None else 200)
    if kept is None:
        assert engine.seen == []
    else:
        assert budget_tokens(resolve_for(LIMITS, asked, 1000), 1000) == kept
