# SPDX-License-Identifier: Apache-2.0
"""Which first tokens of a prompt are its system messages and tools, whatever the chat template does."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from typing import Any

import pytest

from h2o_vllm.server import system_prefix
from h2o_vllm.server.system_part import SystemPart, system_parts
from h2o_vllm.server.system_prefix import SystemPrefix, SystemPrefixes, vllm_render
from tests.server import chat_templates
from tests.server.chat_templates import TEMPLATES, rendering, tokens, with_a_clock

pytestmark = pytest.mark.asyncio

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds."}}
MESSAGES_TOOL = {"name": "add", "description": "Adds.", "input_schema": {}}


def part_of(path: str, body: Mapping[str, Any]) -> SystemPart:
    parts = system_parts(path, body)
    assert parts is not None
    (part,) = parts
    return part


async def protected(template: str, path: str, body: Mapping[str, Any]) -> str:
    """The beginning of the body's prompt that is found to be its system part."""
    part = part_of(path, body)
    found = await SystemPrefixes(rendering(TEMPLATES[template])).find(part)
    prompt = tokens(TEMPLATES[template], part.kind, body)
    return bytes(prompt[: found.length_in(prompt)].tolist()).decode()


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        ("chatml", {}, "<system>Be brief.</><user>"),
        ("chatml", {"tools": [TOOL]}, "[add:Adds.;]<system>Be brief.</><user>"),
        ("without_tools", {"tools": [TOOL]}, "<system>Be brief.</><user>"),
        ("merged", {}, "<user>Be brief.\n\n"),
        ("merged", {"tools": [TOOL]}, "<user>add:Adds.;Be brief.\n\n"),
        # What all prompts of such a template begin with.
        ("dropped", {}, "<user>"),
        ("moved", {}, "<user>"),
        ("tools_last", {}, "<system>Be brief.</><user>"),
        # With one user turn the tools would stand here, in this chat they do not.
        ("tools_last", {"tools": [TOOL]}, "<system>Be brief.</>"),
    ],
)
async def test_chat(template: str, fields: dict[str, Any], expected: str) -> None:
    got = await protected(template, CHAT, {"messages": [SYSTEM, *TURNS], **fields})
    assert got == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ([{"role": "developer", "content": "Be brief."}], "<system>Be brief.</><user>"),
        ([SYSTEM, SYSTEM], "<system>Be brief.</><system>Be brief.</><user>"),
        (
            [{"role": "system", "content": [{"type": "text", "text": "Be."}]}],
            "<system>Be.</><user>",
        ),
        ([{"role": "system", "content": "Short. \n"}], "<system>Short. \n</><user>"),
    ],
)
async def test_system_messages(head: list[dict[str, Any]], expected: str) -> None:
    assert await protected("chatml", CHAT, {"messages": [*head, *TURNS]}) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be brief."},
                    {"type": "text", "text": "x-anthropic-billing-header: 1"}]},
        {"tools": [MESSAGES_TOOL]},
    ],
)  # fmt: skip
async def test_messages(fields: dict[str, Any]) -> None:
    got = await protected("chatml", "/v1/messages", {"messages": TURNS, **fields})
    assert got.endswith("<user>")
    assert ("Be brief." if "system" in fields else "[add:Adds.;]") in got


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "Hi", "instructions": "Be brief."},
        {"input": [{"role": "system", "content": "Be brief."}, *TURNS]},
    ],
)
async def test_responses(fields: dict[str, Any]) -> None:
    assert await protected("chatml", "/v1/responses", fields) == "<system>Be brief.</><user>"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": TURNS}),
        (CHAT, {"messages": [*TURNS, SYSTEM]}),
        (CHAT, {"messages": [{"role": "system", "content": " \n"}, *TURNS]}),
        (CHAT, {"messages": [{"role": "system", "content": None}]}),
        (CHAT, {"messages": "Hi"}),
        (CHAT, {"messages": [["Hi"]], "tools": []}),
        (CHAT, {}),
        ("/v1/messages", {"messages": TURNS, "system": ""}),
        ("/v1/responses", {"input": "Hi"}),
        # The head of these turns stands behind the earlier ones.
        ("/v1/responses", {"input": [SYSTEM, *TURNS], "previous_response_id": "resp_1"}),
    ],
)
async def test_nothing_to_protect(path: str, body: dict[str, Any]) -> None:
    assert part_of(path, body).is_empty


@pytest.mark.parametrize(
    ("template", "path", "fields", "expected"),
    [
        ("chatml", CHAT, {"messages": [SYSTEM, *TURNS]}, "<system>Be brief.</><user>Hi</><assistant>"),
        ("chatml", CHAT, {"messages": TURNS}, "<user>Hi</><assistant>"),
        ("merged", CHAT, {"messages": [SYSTEM, *TURNS]}, "<user>Be brief.\n\nHi</><assistant>"),
        # Tools stand behind the task there.
        ("tools_last", CHAT, {"messages": TURNS, "tools": [TOOL]}, "<user>Hi</><assistant>"),
        ("chatml", CHAT, {"messages": [SYSTEM, *TURNS[1:]]}, "<system>Be brief.</><"),
        ("chatml", "/v1/messages", {"messages": TURNS, "system": "Be brief."},
         "<system>Be brief.</><user>Hi</><assistant>"),
        ("chatml", "/v1/responses", {"input": "Hi"}, "<user>Hi</>"),
        ("chatml", "/v1/responses", {"input": TURNS}, "<user>Hi</><assistant>"),
    ],
)  # fmt: skip
async def test_a_task_is_the_users_first_message(
    template: str, path: str, fields: dict[str, Any], expected: str
) -> None:
    parts = system_parts(path, fields, task=True)
    assert parts is not None and not parts[0].is_empty
    found = await SystemPrefixes(rendering(TEMPLATES[template])).find(parts[0])
    prompt = tokens(TEMPLATES[template], parts[0].kind, fields)
    assert bytes(prompt[: found.length_in(prompt)].tolist()).decode() == expected


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
async def test_no_roles(path: str) -> None:
    assert system_parts(path, {"prompt": "Hi"}) is None


async def test_batch_has_a_part_for_each_chat() -> None:
    chats = [[SYSTEM, *TURNS], TURNS, [{"role": "system", "content": "Else."}]]
    parts = system_parts(f"{CHAT}/batch", {"messages": chats})
    assert parts is not None
    assert [part.is_empty for part in parts] == [False, True, False]


async def test_many_who_ask_at_once_are_one_measurement() -> None:
    render = rendering(TEMPLATES["chatml"])
    prefixes = SystemPrefixes(render)
    bodies: list[dict[str, Any]] = [{"messages": [SYSTEM, turn]} for turn in TURNS] * 4
    found = await asyncio.gather(*(prefixes.find(part_of(CHAT, body)) for body in bodies))
    assert render.calls == 2
    assert all(one is found[0] for one in found)
    await prefixes.find(part_of(CHAT, {"messages": [SYSTEM], "chat_template_kwargs": {"a": 1}}))
    assert render.calls == 4


async def test_one_who_leaves_takes_nothing_away() -> None:
    prefixes = SystemPrefixes(rendering(TEMPLATES["chatml"]))
    part = part_of(CHAT, {"messages": [SYSTEM]})
    first = asyncio.ensure_future(prefixes.find(part))
    second = asyncio.ensure_future(prefixes.find(part))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).failure is None


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_prefix, "MAX_TOKENS", 100)
    render = rendering(TEMPLATES["chatml"])
    prefixes = SystemPrefixes(render)
    parts = [
        part_of(CHAT, {"messages": [{"role": "system", "content": f"{i}" * 40}]}) for i in range(4)
    ]
    for part in parts:
        await prefixes.find(part)
    assert len(prefixes._known) == 1
    assert prefixes._tokens <= 100
    await prefixes.find(parts[-1])
    assert render.calls == 8
    await prefixes.find(parts[0])
    assert render.calls == 10


async def test_parts_that_have_no_tokens_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_prefix, "MAX_PARTS", 3)
    render = rendering(lambda turns, tools: turns[-1][1])
    prefixes = SystemPrefixes(render)
    parts = [part_of(CHAT, {"messages": [{"role": "system", "content": f"{i}"}]}) for i in range(9)]
    for part in parts:
        assert (await prefixes.find(part)).failure is not None
    assert len(prefixes._known) == 3
    calls = render.calls
    await prefixes.find(parts[-1])
    assert render.calls == calls, "the newest ones are known"


async def test_what_cannot_be_rendered_says_why_and_is_tried_again() -> None:
    calls = []

    async def render(kind: str, body: Mapping[str, Any]) -> Any:
        calls.append(kind)
        raise ValueError("no such model")

    prefixes = SystemPrefixes(render)
    for _ in range(2):
        found = await prefixes.find(part_of(CHAT, {"messages": [SYSTEM]}))
        assert found.failure == "no such model"
        assert found.length_in([1, 2]) == 0
    assert len(calls) == 2
    failure = (
        await SystemPrefixes(vllm_render(None)).find(part_of(CHAT, {"messages": [SYSTEM]}))
    ).failure
    assert failure == "this server renders no chats"


async def test_nesting_without_end_is_no_key() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    part = part_of(CHAT, {"messages": [SYSTEM], "chat_template_kwargs": deep})
    assert (await SystemPrefixes(rendering(TEMPLATES["chatml"])).find(part)).failure


@pytest.mark.parametrize(
    ("prompt", "length"),
    [([1, 2, 3, 4, 9], 4), ([1, 2, 3, 9], 3), ([1, 2, 3], 3), ([9, 1, 2], 0), ([], 0)],
)
async def test_what_a_prompt_has_in_common_counts(prompt: list[int], length: int) -> None:
    assert SystemPrefix(array("i", [1, 2, 3, 4])).length_in(prompt) == length


async def test_a_prefix_that_is_out_of_date_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_templates, "CLOCK", ["10:00"])
    render = rendering(with_a_clock())
    prefixes, part = SystemPrefixes(render), part_of(CHAT, {"messages": [SYSTEM]})
    old = await prefixes.find(part)
    assert await prefixes.find(part) is old
    chat_templates.CLOCK[0] = "10:01"
    new = await asyncio.gather(*[prefixes.find(part, outdated=old) for _ in range(8)])
    assert {bytes(each.tokens.tolist()) for each in new} == {b"<system>[10:01]Be brief.</><user>"}
    # Another request that had the old one finds the new one measured.
    assert await prefixes.find(part, outdated=old) is new[0] is await prefixes.find(part)
    assert render.calls == 4
    assert prefixes._tokens == len(new[0].tokens)
