# SPDX-License-Identifier: Apache-2.0
"""Which first tokens of a prompt are its system messages and tools, whatever the chat template does."""

from collections.abc import Mapping
from typing import Any

import pytest

from h2o_vllm.server.system_prefix import KINDS, NEEDS, system_prefixes
from tests.server.chat_templates import TEMPLATES, rendering, tokens

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds."}}
MESSAGES_TOOL = {"name": "add", "description": "Adds.", "input_schema": {}}


async def protected(template: str, path: str, body: Mapping[str, Any], word: str = "system") -> str:
    """The beginning of the body's prompt that is found to be its system part."""
    (found,) = await system_prefixes(rendering(TEMPLATES[template]), path, body, word)
    prompt = tokens(TEMPLATES[template], KINDS[path], body)
    return bytes(prompt[: found.length_in(prompt)].tolist()).decode()


BRIEF = "<system>Be brief.</><user>"
HEAD = {"messages": [SYSTEM, *TURNS]}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TEXTS = [{"type": "text", "text": "Be."}, {"type": "text", "text": "x-anthropic-billing-header: 1"}]


@pytest.mark.parametrize(
    ("template", "path", "body", "expected"),
    [
        ("chatml", CHAT, HEAD, BRIEF),
        ("chatml", CHAT, HEAD | {"tools": [TOOL]}, f"[add:Adds.;]{BRIEF}"),
        ("without_tools", CHAT, HEAD | {"tools": [TOOL]}, BRIEF),
        ("merged", CHAT, HEAD, "<user>Be brief.\n\n"),
        ("merged", CHAT, HEAD | {"tools": [TOOL]}, "<user>add:Adds.;Be brief.\n\n"),
        # What all prompts of such a template begin with.
        ("dropped", CHAT, HEAD, "<user>"),
        ("moved", CHAT, HEAD, "<user>"),
        ("tools_last", CHAT, HEAD, BRIEF),
        # With one user turn the tools would stand here, in this chat they do not.
        ("tools_last", CHAT, HEAD | {"tools": [TOOL]}, "<system>Be brief.</>"),
        ("chatml", CHAT, {"messages": [SYSTEM | {"role": "developer"}, *TURNS]}, BRIEF),
        ("chatml", CHAT, {"messages": [SYSTEM, SYSTEM, *TURNS]}, f"{BRIEF[:-6]}{BRIEF}"),
        ("chatml", CHAT, {"messages": [SYSTEM | {"content": TEXTS[:1]}, *TURNS]}, "<system>Be.</><user>"),
        ("chatml", CHAT, {"messages": [SYSTEM | {"content": "S. \n"}, *TURNS]}, "<system>S. \n</><user>"),
        ("chatml", MESSAGES, {"messages": TURNS, "system": "Be brief."}, BRIEF),
        ("chatml", MESSAGES, {"messages": TURNS, "tools": [MESSAGES_TOOL]}, "[add:Adds.;]<user>"),
        ("chatml", RESPONSES, {"input": "Hi", "instructions": "Be brief."}, BRIEF),
        ("chatml", RESPONSES, {"input": [SYSTEM, *TURNS]}, BRIEF),
    ],
)  # fmt: skip
async def test_the_system_part_is_where_the_template_puts_it(
    template: str, path: str, body: dict[str, Any], expected: str
) -> None:
    assert await protected(template, path, body) == expected


async def test_a_system_text_of_several_parts_is_one() -> None:
    got = await protected("chatml", MESSAGES, {"messages": TURNS, "system": TEXTS})
    assert got.startswith("<system>Be.") and got.endswith("<user>")


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
    (found,) = await system_prefixes(rendering(TEMPLATES["chatml"]), path, body, "system")
    assert found.failure == NEEDS["system"]


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
    assert await protected(template, path, fields, "task") == expected


async def test_what_cannot_be_rendered_says_why() -> None:
    async def render(kind: str, body: Mapping[str, Any]) -> Any:
        raise ValueError("no such model")

    (found,) = await system_prefixes(render, CHAT, {"messages": [SYSTEM]}, "system")
    assert "no such model" in str(found.failure)
    assert found.length_in([1, 2]) == 0
