# SPDX-License-Identifier: Apache-2.0
"""Chat templates as models have them, reduced to what they do with system messages and tools.

A prompt's tokens are its characters.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any

Turns = list[tuple[str, str]]
Template = Callable[[Turns, str], str]


def chatml(turns: Turns, tools: str) -> str:
    """Qwen, SmolLM2: every turn in its place, tools behind the first system message."""
    text = "".join(f"<{role}>{said}</>" for role, said in turns if role != "tools")
    return f"[{tools}]{text}" if tools else text


def without_tools(turns: Turns, tools: str) -> str:
    """SmolLM2 proper."""
    return chatml(turns, "")


def merged(turns: Turns, tools: str) -> str:
    """Gemma, Mistral: the system text stands inside the first user turn."""
    system = " ".join(said for role, said in turns if role == "system")
    text = "".join(f"<{role}>{said}</>" for role, said in turns if role != "system")
    return text.replace("<user>", f"<user>{tools}{system}\n\n", 1)


def dropped(turns: Turns, tools: str) -> str:
    """One that knows no system messages."""
    return chatml([(role, said) for role, said in turns if role != "system"], "")


def moved(turns: Turns, tools: str) -> str:
    """One that puts the system text last."""
    system = "".join(said for role, said in turns if role == "system")
    return dropped(turns, tools) + f"<system>{system}</>"


def tools_last(turns: Turns, tools: str) -> str:
    """Mistral: tools stand before the last user turn."""
    before, _, last = without_tools(turns, "").rpartition("<user>")
    return f"{before}{f'[{tools}]' if tools else ''}<user>{last}"


TEMPLATES: dict[str, Template] = {
    each.__name__: each for each in (chatml, without_tools, merged, dropped, moved, tools_last)
}


def tokens(template: Template, kind: str, body: Mapping[str, Any]) -> array[int]:
    """The prompt of a request body."""
    turns: Turns = []
    for first in (body.get("system"), body.get("instructions")):
        if first:
            turns.append(("system", text_of(first)))
    said = body["input" if kind == "responses" else "messages"]
    for turn in [{"role": "user", "content": said}] if isinstance(said, str) else said:
        role = "system" if turn["role"] == "developer" else turn["role"]
        turns.append((role, text_of(turn["content"])))
    tools = "".join(
        f"{tool.get('function', tool)['name']}:{tool.get('function', tool).get('description')};"
        for tool in body.get("tools") or []
    )
    return array("i", list(template(turns, tools).encode()))


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def rendering(template: Template) -> Any:
    """What :func:`~h2o_vllm.server.system_prefix.system_prefixes` asks; counts how often in ``calls``."""

    async def render(kind: str, body: Mapping[str, Any]) -> array[int]:
        render.calls += 1
        return tokens(template, kind, body)

    render.calls = 0
    return render
