# SPDX-License-Identifier: Apache-2.0
"""The chats of a traffic: what is asked in each turn, and what has been answered. Imports nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from loadtest.engine.prefix_traffic import Traffic

__all__ = ["Chat", "chats_of"]


@dataclass
class Chat:
    """One chat: its prompt grows by its answers and by what the user says next."""

    prompt: list[int]
    later: list[list[int]]
    turn: int = 0
    asked_at: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    replies: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    def hears(self, output: Any) -> None:
        """Take a ``RequestOutput``: with several answers, each has outputs of its own."""
        for reply in output.outputs:
            self.replies[reply.index] = list(reply.token_ids)
            self.cached[reply.index] = output.num_cached_tokens or 0

    def next_turn(self) -> bool:
        """Count the answers, go on from the first and with the next question, if there is one."""
        self.prompt_tokens += len(self.prompt) * len(self.replies)
        self.cached_tokens += sum(self.cached.values())
        self.output_tokens += sum(map(len, self.replies.values()))
        if not self.later:
            return False
        self.prompt = [*self.prompt, *self.replies[0], *self.later.pop(0)]
        self.replies = {}
        self.turn += 1
        return True


def chats_of(traffic: Traffic, tokens: list[int]) -> list[Chat]:
    """The chats of a traffic: stretches of one text, each used once."""
    place = traffic.shared
    chats = []
    for _ in range(traffic.chats):
        turns = []
        for _ in range(traffic.turns):
            turns.append(tokens[place : place + traffic.own])
            place += traffic.own
        first, *later = turns
        chats.append(Chat([*tokens[: traffic.shared], *first], later))
    return chats
