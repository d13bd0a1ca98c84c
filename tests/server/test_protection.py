# SPDX-License-Identifier: Apache-2.0
"""``kv_protect`` in words becomes a number before the engine sees it, or a 400 that says why not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server.protection import Protection, asked_protection, install, protecting
from h2o_vllm.server.protocol import RefusalError
from h2o_vllm.server.system_prefix import SystemPrefixes
from tests.server.chat_templates import TEMPLATES, rendering, tokens

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
CHATS = {"messages": MESSAGES}
PROMPT = tokens(TEMPLATES["chatml"], "chat", CHATS).tolist()
LENGTH = len("<system>Be brief.</><user>")


def protection(
    asked: dict[str, Any],
    body: dict[str, Any] = CHATS,
    path: str = CHAT,
    template: str = "chatml",
    **config: Any,
) -> Protection:
    """As the middleware has it when the body has been read."""
    fields = {"kv_budget": 0.2} | asked
    found = asked_protection(path, body, fields, H2OConfig(**config))
    asyncio.run(found.find(SystemPrefixes(rendering(TEMPLATES[template]))))
    return found


SYSTEM = {"kv_protect": "system"}


def test_system_is_the_number_of_its_tokens() -> None:
    assert protection(SYSTEM).tokens_of(PROMPT) == LENGTH
    assert protection({}, kv_protect="system").tokens_of(PROMPT) == LENGTH


@pytest.mark.parametrize(
    "asked", [{}, {"kv_protect": 7}, {"kv_protect": 0}, {"kv_protect": "prompt"}]
)
def test_who_does_not_ask_is_not_rendered(asked: dict[str, Any]) -> None:
    found = protection(asked)
    assert found.word is None and found.parts == []
    number = protection({"kv_protect": 0}, kv_protect="system")
    assert number.word is None and number.parts == []


@pytest.mark.parametrize("asked", [{"kv_budget": 1.0}, {"kv_budget": 1.0, "kv_policy": "full"}])
def test_where_nothing_is_evicted_nothing_is_rendered(asked: dict[str, Any]) -> None:
    found = protection(SYSTEM | asked)
    assert found.parts == []
    assert found.tokens_of(PROMPT) == 0


def test_each_chat_of_a_batch_has_its_own() -> None:
    chats = [MESSAGES, [{"role": "system", "content": "Be very brief."}, MESSAGES[1]]]
    found = protection(SYSTEM, {"messages": chats}, f"{CHAT}/batch")
    prompts = [tokens(TEMPLATES["chatml"], "chat", {"messages": chat}).tolist() for chat in chats]
    assert [found.tokens_of(prompt) for prompt in prompts] == [LENGTH, LENGTH + 5]


def test_the_calls_of_an_agent_have_one_beginning() -> None:
    found = protection(SYSTEM)
    assert [found.tokens_of(PROMPT + [1] * more) for more in range(3)] == [LENGTH] * 3


@pytest.mark.parametrize(
    ("body", "path", "reason", "by_default"),
    [
        ({"messages": MESSAGES[1:]}, CHAT, "value", 0),
        ({"messages": [MESSAGES, MESSAGES[1:]]}, f"{CHAT}/batch", "value", LENGTH),
        ({"messages": []}, f"{CHAT}/batch", "value", 0),
        ({"prompt": "Hi"}, "/v1/completions", "unsupported", 0),
        ({"prompt": "Hi"}, "/invocations", "unsupported", 0),
    ],
)
def test_no_system_part_is_a_400_for_who_names_it(
    body: dict[str, Any], path: str, reason: str, by_default: int
) -> None:
    with pytest.raises(RefusalError, match="kv_protect: 'system' ") as caught:
        protection(SYSTEM, body, path)
    assert (caught.value.param, caught.value.reason) == ("kv_protect", reason)
    # A server's default protects what there is.
    default = protection({}, body, path, kv_protect="system")
    assert [default.tokens_of(PROMPT), default.tokens_of(PROMPT)] == [by_default, 0]


@pytest.mark.parametrize("template", ["dropped", "moved"])
def test_template_that_does_not_begin_with_the_part(template: str) -> None:
    prompt = tokens(TEMPLATES[template], "chat", CHATS).tolist()
    refused: list[str] = []
    found = protection(SYSTEM, template=template)
    found.count_refusal = refused.append
    with pytest.raises(VLLMValidationError, match=r"kv_protect must be .* got 'system'") as caught:
        found.tokens_of(prompt)
    assert caught.value.parameter == "kv_protect" and refused == ["value"]
    assert protection({}, template=template, kv_protect="system").tokens_of(prompt) == 0


def test_a_prompt_that_begins_otherwise_is_not_protected_by_another_ones_number() -> None:
    with pytest.raises(VLLMValidationError, match="does not begin"):
        protection(SYSTEM).tokens_of([1, *PROMPT])
    with pytest.raises(VLLMValidationError, match="no tokens"):
        protection(SYSTEM).tokens_of(None)


def test_limit_of_the_operator() -> None:
    with pytest.raises(VLLMValidationError, match=f"at most 8 tokens here .* have {LENGTH}\\)"):
        protection(SYSTEM, kv_protect_max=8).tokens_of(PROMPT)
    assert protection(SYSTEM, kv_protect_max=LENGTH).tokens_of(PROMPT) == LENGTH
    asked = {"kv_protect": "prompt"}
    with pytest.raises(VLLMValidationError, match=f"the prompt has {len(PROMPT)}\\), got 'prompt'"):
        protection(asked, kv_protect_max=8).tokens_of(PROMPT)
    assert protection(asked, kv_protect_max=99).tokens_of(PROMPT) == len(PROMPT)
    default = protection({}, kv_protect="system", kv_protect_max=8)
    assert default.tokens_of(PROMPT) == 8


class Client:
    """Notes the parameters of each call."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> None:
        self.seen.append(sampling_params.extra_args)


def test_the_number_reaches_the_engine_and_nothing_else_changes() -> None:
    client = Client()
    config = SimpleNamespace(is_encoder_decoder=False)
    install(client, config)
    wrapped = client.generate
    install(client, config)
    assert client.generate == wrapped
    shared = {"kv_protect": "system", "mine": 1}
    prompt = {"type": "token", "prompt_token_ids": PROMPT}
    client.generate(prompt, SimpleNamespace(extra_args=shared), "outside of a request")
    with protecting() as guard:
        client.generate(prompt, SimpleNamespace(extra_args=shared), "body not read")
        guard.protection = protection(SYSTEM)
        client.generate(prompt, SimpleNamespace(extra_args=shared), "by place")
        client.generate(
            prompt=prompt, sampling_params=SimpleNamespace(extra_args=None), request_id="by name"
        )
    with protecting():
        client.generate(prompt, SimpleNamespace(extra_args=None), "the next request")
    assert client.seen == [
        shared,
        shared,
        {"kv_protect": LENGTH, "mine": 1},
        {"kv_protect": LENGTH},
        None,
    ]
    assert shared == {"kv_protect": "system", "mine": 1}
