# SPDX-License-Identifier: Apache-2.0
"""The page ``/h2o/``: what is served, under which policy, to whom; the text of single tokens."""

import base64
import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers import AutoTokenizer

from h2o_vllm.blocks.counts.schedule import OtherGroup
from h2o_vllm.config.request_fields import MAX_TRACE_TOKENS
from h2o_vllm.config.settings import OPTIONS, REQUEST_FIELDS
from h2o_vllm.models import default_model_dir
from h2o_vllm.policy.policy import Policy
from h2o_vllm.server import playground
from h2o_vllm.server.playground.pieces import pieces_of
from tests.server.vllm_like import Engine, build, client_of, lifespan, post

FILES = playground.files()
TEXT = "Grüße, 世界! Two  blanks,\n\ta tab: 🙂👩‍👩‍👧 done."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(default_model_dir())


def served(key: str | None = None, *, on: bool = True, tokenizer: Any = None) -> FastAPI:
    engine = Engine()
    engine.get_tokenizer = lambda: tokenizer
    return build(engine, args=SimpleNamespace(api_key=[key] if key else None, kv_playground=on))


async def get(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    async with client_of(app) as client:
        return await client.get(path, headers=headers)


def basic(user_and_password: str) -> str:
    return f"Basic {base64.b64encode(user_and_password.encode()).decode()}"


@pytest.mark.parametrize("name", FILES)
async def test_every_file_is_served_under_a_policy_that_shuts_everybody_else_out(name: str) -> None:
    answer = await get(served(), f"/h2o/{'' if name == 'index.html' else name}")
    assert answer.status_code == 200 and answer.content == FILES[name][0]
    assert answer.headers["content-type"] == FILES[name][1]
    directives = dict(
        directive.split(" ", 1)
        for directive in answer.headers["content-security-policy"].split("; ")
    )
    assert directives.pop("default-src") == "'none'"
    assert {"script-src", "style-src", "connect-src", "base-uri", "frame-ancestors"} <= set(
        directives
    )
    assert set(directives.values()) <= {"'self'", "'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_only_files_of_the_page_are_served_and_none_without_the_option() -> None:
    for path in ("/h2o/../access.py", "/h2o/%2e%2e/access.py", "/h2o/static/main.js"):
        assert (await get(served(), path)).status_code == 404
    for path in ("/h2o/", "/h2o/main.js"):
        assert (await get(served(on=False), path)).status_code == 404


async def test_the_page_is_behind_the_key_which_a_browser_may_send_as_a_password() -> None:
    app = served("secret")
    for path in ("/h2o/", "/h2o/main.js", "/h2o"):
        refused = await get(app, path)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        for sent in (
            "Bearer wrong",
            basic("user:wrong"),
            basic("secret:"),
            basic("secret"),
            "Basic !",
        ):
            assert (await get(app, path, authorization=sent)).status_code == 401
    for sent in ("Bearer secret", basic("user:secret"), basic(":secret")):
        assert (await get(app, "/h2o/", authorization=sent)).status_code == 200


@pytest.mark.parametrize(
    ("beside", "why"),
    [((), ""), ((OtherGroup(16, 3),), "its model has windows, chunks or states beside full attention")],
)  # fmt: skip
async def test_the_page_hears_why_nothing_settles_where_it_is_always_a_400(
    beside: tuple[OtherGroup, ...], why: str
) -> None:
    engine = Engine()

    async def told(_: str, args: Any) -> Any:
        return [beside]

    engine.collective_rpc = told
    app = build(engine)
    await lifespan(app)
    limits = (await get(app, "/plugins/h2o/config")).json()["limits"]
    assert limits["no_settling_reason"] == why
    answer = await post(app, kv_budget=0.5, kv_settle_tokens=256, kv_policy="key")
    assert answer.status_code == (400 if why else 200)
    assert f"must be 0 on this server ({why})" in answer.text or not why


async def test_a_password_opens_nothing_but_the_page() -> None:
    """A browser sends it along with what another site makes it ask for."""
    headers = {"authorization": basic("user:secret")}
    async with client_of(served("secret")) as client:
        for path in ("/v1/completions", "/h2o/pieces", "/h2o/"):
            answer = await client.post(path, json={"token_ids": [], "prompt": "p"}, headers=headers)
            assert answer.status_code == 401
            assert "www-authenticate" not in answer.headers
        for path in ("/plugins/h2o/config", "/h2other"):
            assert (await client.get(path, headers=headers)).status_code == 401


def test_the_page_asks_nobody_else_and_inserts_text_as_text() -> None:
    for name, (content, _) in FILES.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text), name
        for markup in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert markup not in text, name
        for target in re.findall(r'(?:href|src|from)[= ]"([^"#]+)"', text):
            assert target.removeprefix("./") in FILES, f"{name}: {target}"


def test_every_name_of_ours_on_the_page_is_one_of_today() -> None:
    known = {*REQUEST_FIELDS, *(row.name for row in OPTIONS), "kv_cache", "kv_heads"}
    known |= {"kv_delay_max", "kv_policies", "no_settling_reason"}
    for name, (content, _) in FILES.items():
        text = content.decode()
        assert set(re.findall(r"\bkv_[a-z_]+", text)) <= known, name
        for policy in re.findall(r"kv_policy ([a-z+]+)", text):
            Policy.parse(policy, calibrated=True)


def test_pieces_make_up_the_text_and_what_is_no_text_is_marked(tokenizer: Any) -> None:
    for text in (TEXT, "", " leading", "\ufffd", "🙂"):
        tokens = tokenizer.encode(text)
        pieces = pieces_of(tokens, tokenizer.decode)
        assert len(pieces) == len(tokens) and "".join(pieces) == text
    broken = tokenizer.encode("🙂")[:1] * 30 + tokenizer.encode(" and then words")
    said = "".join(pieces_of(broken, tokenizer.decode))
    assert said.startswith("\ufffd") and said.endswith(" and then words")


async def test_pieces_are_checked_before_anybody_decodes(tokenizer: Any) -> None:
    async with client_of(served(tokenizer=tokenizer)) as client:

        async def pieces(ids: Any) -> httpx.Response:
            return await client.post("/h2o/pieces", json={"token_ids": ids})

        good = await pieces(tokenizer.encode("a word"))
        assert good.status_code == 200 and "".join(good.json()["pieces"]) == "a word"
        assert (await pieces([len(tokenizer)])).status_code == 400
        for ids in ([-1], ["a"], "a", [1.5], [1] * (MAX_TRACE_TOKENS + 1), None):
            assert (await pieces(ids)).status_code == 422
