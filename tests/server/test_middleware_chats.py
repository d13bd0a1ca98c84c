# SPDX-License-Identifier: Apache-2.0
"""The layer around vLLM's application: Anthropic's API, and ``kv_protect: "system"``."""

import itertools

import pytest

from h2o_vllm.config.options import H2OConfig
from tests.server.chat_templates import TEMPLATES
from tests.server.vllm_like import Engine, Rendering, build, post

CHAT = [{"role": "user", "content": "Hi"}]


async def test_system_is_refused_where_there_is_none_and_where_it_is_not_first() -> None:
    engine = Engine()
    app = build(engine, serving_render=Rendering(lambda turns, tools: turns[-1][1]))
    fields = {"kv_budget": 0.2, "kv_protect": "system", "model": "m", "messages": CHAT}
    for more, says in (
        ({}, "needs a system message"),
        ({"system": "Be brief."}, "does not begin with it"),
    ):
        response = await post(app, "/v1/messages", **fields, max_tokens=9, **more)
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]
    assert engine.seen == []


async def test_what_vllm_refuses_is_not_blamed_on_the_word() -> None:
    class Broken:
        """Renders nothing, as with an unknown model, an empty list of tools, too many tokens."""

    app = build(Engine(), H2OConfig(kv_protect="task"), serving_render=Broken())
    for named in ({}, {"kv_protect": "system"}):
        messages = [{"role": "system", "content": "Be brief."}, *CHAT]
        fields = {"kv_budget": 0.2, "messages": messages, "tools": [], **named}
        response = await post(app, "/v1/chat/completions", **fields)
        assert (response.status_code, response.json()["error"]["message"]) == (404, "nope")


@pytest.mark.parametrize("named", [False, True])
async def test_with_a_clock_in_the_template_all_is_protected_up_to_what_has_gone_on(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    ticks = itertools.count(100_000_000)
    monkeypatch.setitem(
        TEMPLATES, "chatml", lambda turns, tools: f"<system>{turns[0][1]} {next(ticks)}</><user>"
    )
    engine = Engine()
    config = H2OConfig(kv_budget=0.2, kv_protect=0 if named else "system")
    app = build(engine, config, serving_render=Rendering(TEMPLATES["chatml"]))
    fields = {"system": "Be brief.", **({"kv_protect": "system"} if named else {})}
    for _ in range(3):
        response = await post(app, "/v1/messages", model="m", max_tokens=9, messages=CHAT, **fields)
        assert response.status_code == 200
        protected = engine.seen[-1]["vllm_xargs"]["kv_protect"]
        assert len("<system>Be brief. 10000000") <= protected < len("<system>Be brief. 100000000")
