# SPDX-License-Identifier: Apache-2.0
"""Retains the blocks of an answer that has ended for its next turn, for some time. Engine core.

vLLM admits a waiting request as soon as blocks are free: those of an answer that has just ended. The next
turn comes a moment later, finds the blocks lost, computes its prompt again, and takes the blocks of another
conversation. If memory holds only half of the conversations, every turn is recomputed. If new conversations
wait for a moment, turns that follow at once read what has been computed.

Bounds: blocks are kept for ``seconds`` and at least two steps, or until the turn that wants them is admitted;
a request is overtaken by at most :data:`TURNS_AHEAD` turns for each conversation that is being served, by all
of them together. While blocks are not short, no request waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

TURNS_AHEAD = 8
"""Turns that may be admitted before a request that came earlier, per conversation that is being served."""

STEPS = 2
"""Steps for which blocks are kept at least: a client has an answer's end one step later."""


class Block(Protocol):
    """A block of vLLM's pool."""

    block_id: int
    ref_cnt: int

    @property
    def block_hash(self) -> Any:
        """Its key in the prefix cache; ``None``: it has none."""


@dataclass(eq=False)
class _Answer:
    """What an answer that has ended leaves: blocks, each with the key that it had then.

    Attributes:
        needed: those of its table, or, when its next turn has come, those that the turn has found.
        held: what was held for a next turn that leaves out a part of the answer.
        prompt_tokens: of the request.
        until: when they are no longer kept, by :func:`time.monotonic`.
        steps: how many have begun since.
    """

    needed: list[tuple[Block, Any]]
    held: list[tuple[Block, Any]]
    prompt_tokens: int
    until: float
    steps: int = 0

    @property
    def lost(self) -> bool:
        """Whether a needed block has lost its KV. A look-up then finds far fewer tokens, or none."""
        return any(block.block_hash != key for block, key in self.needed)

    def kept(self) -> Iterator[Block]:
        """The blocks that are free, and still hold what they held."""
        return (
            block
            for block, key in (*self.needed, *self.held)
            if not block.ref_cnt and block.block_hash == key
        )

    def shares(self, found: Mapping[int, Any]) -> int:
        """How many of the blocks are in ``found``: keys by block id."""
        return sum(
            block.block_id in found and found[block.block_id] == key
            for block, key in (*self.needed, *self.held)
        )


class RetainedAnswers:
    """Answers that have ended, and the requests that wait for room or are their next turns."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """For how long blocks are kept; 0: not at all."""
        self._answers: list[_Answer] = []
        self._turns: dict[str, _Answer] = {}
        self._overtaken: dict[str, int] = {}
        self._admitted = self._running = self._idle = 0
        self._defers = self._any_waits = self._checked = False

    def begin_step(self, running: int, *, idle: bool) -> list[Block]:
        """Forget answers whose time is over, unless their next turns wait for requests that run.

        Args:
            running: how many requests run whose segments settle. idle: whether no request runs.

        Returns:
            The free blocks that are kept, those that may be lost last first; none while no request waits.
        """
        asked, self._defers, self._any_waits, self._checked = self._any_waits, False, False, False
        self._running, self._idle = running, self._idle + 1 if idle else 0
        if not self._answers:
            return []
        now = time.monotonic()
        wanted = {*map(id, self._turns.values())} if self._idle <= STEPS else set()
        for answer in self._answers:
            answer.steps += 1
        self._answers = [
            answer
            for answer in self._answers
            if id(answer) in wanted or answer.steps <= STEPS or now < answer.until
        ]
        return [*self._kept().values()] if asked else []

    def on_finish(
        self, request_id: str, prompt_tokens: int, table: Iterable[Block], held: Iterable[Block]
    ) -> None:
        """Keep the blocks of a request that has ended; they are freed in a moment.

        Args:
            table: its own. held: see :class:`.SettledBlocks`.
        """
        self._forget(request_id)
        if self.seconds and (needed := _with_keys(table)):
            until = time.monotonic() + self.seconds
            self._answers.append(_Answer(needed, _with_keys(held), prompt_tokens, until))

    def on_request(self, request_id: str, hit: Iterable[Block], reached: int) -> None:
        """Note a new request: it may be the next turn of an answer.

        Args:
            hit: what it finds in the cache, up to about the token ``reached``.
        """
        found = _with_keys(hit)
        keys, place, most = {block.block_id: key for block, key in found}, -1, 0
        for index, answer in enumerate(self._answers):
            # All conversations may share a system prompt; a next turn has all of the prompt before it.
            same = answer.shares(keys) if reached >= answer.prompt_tokens else 0
            if same > most and 2 * same >= len(answer.needed):
                place, most = index, same
        if most:
            answer = self._answers[place]
            wanted = _Answer(found, [], answer.prompt_tokens, answer.until, answer.steps)
            self._answers[place] = self._turns[request_id] = wanted

    @property
    def any_retained(self) -> bool:
        """Whether any answer's blocks are kept."""
        return bool(self._answers)

    def should_defer(self, request_id: str, blocks_left: Callable[[], int]) -> bool:
        """Whether the admission of a request would take blocks that are kept for next turns of other chats.

        Args:
            blocks_left: gives the number of free blocks less those that it will take; may be negative.
        """
        if not self._answers:
            return False
        self._any_waits = True
        if not self._checked:
            self._drop_lost()
        if request_id in self._turns:
            return False
        overtaken = self._admitted - self._overtaken.setdefault(request_id, self._admitted)
        if not self._defers:
            room = blocks_left()
            if room >= sum(len(answer.needed) + len(answer.held) for answer in self._answers):
                return False
            kept = len(self._kept())
            if not kept or room >= kept:
                return False
            if overtaken >= TURNS_AHEAD * (self._running + len(self._answers)):
                return False
        # Requests behind one that waits do not overtake it by being smaller.
        self._defers = True
        return True

    def on_admission(self, request_id: str) -> None:
        """Note that a request has its blocks, also those that were kept for it."""
        self._checked = False
        answer = self._forget(request_id)
        if answer is not None:
            self._admitted += 1
            self._answers = [one for one in self._answers if one is not answer]

    def _drop_lost(self) -> None:
        """Forget answers of which a block has been lost, also if their next turns wait: these begin anew."""
        self._checked = True
        lost = {id(answer) for answer in self._answers if answer.lost}
        if lost:
            self._answers = [one for one in self._answers if id(one) not in lost]
            self._turns = {name: one for name, one in self._turns.items() if id(one) not in lost}

    def _kept(self) -> dict[int, Block]:
        """By id, those of the last answer first. Answers may share blocks."""
        return {
            block.block_id: block for answer in reversed(self._answers) for block in answer.kept()
        }

    def _forget(self, request_id: str) -> _Answer | None:
        self._overtaken.pop(request_id, None)
        return self._turns.pop(request_id, None)


def _with_keys(blocks: Iterable[Block]) -> list[tuple[Block, Any]]:
    return [(block, block.block_hash) for block in blocks if block.block_hash is not None]
