# SPDX-License-Identifier: Apache-2.0
"""A server by counts alone: which requests run in each step, and how many blocks each holds. Pure.

Requests are there at the start and are served in order. As in vLLM, running requests come first, a prompt is
let in when there are blocks for all of it, and where a running request finds no block the youngest is
preempted and computed anew. As in h2o_vllm, blocks in excess of a budget are freed before the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from loadtest.common.statistics import percentile

__all__ = ["Load", "Outcome", "Pool", "Request", "Step", "held_tokens", "simulate"]


@dataclass(frozen=True)
class Load:
    """What a request asks for.

    Attributes:
        budget: ``kv_budget``; 1: everything. delay: ``kv_delay``. floor: ``kv_min_tokens``.
        prefill: ``kv_prefill_tokens``; 0: no bound.
    """

    budget: float = 1.0
    delay: int = 16
    floor: int = 128
    prefill: int = 0


@dataclass(frozen=True)
class Pool:
    """KV memory, and vLLM's limits on a batch."""

    blocks: int
    block_size: int = 32
    max_seqs: int = 256
    max_batched: int = 2048


@dataclass
class Request:
    """One request: its lengths, what it asks for, and how far it is."""

    prompt: int
    output: int
    load: Load
    computed: int = 0
    generated: int = 0
    freed: int = 0
    blocks: int = 0
    first: float | None = None

    @property
    def wanted(self) -> int:
        """Tokens that have to be computed before it generates: the prompt, and behind a preemption more."""
        return self.prompt + self.generated

    def excess(self, size: int) -> int:
        """Blocks that its budget frees now."""
        seen, load = self.computed, self.load
        past_prompt = seen >= self.prompt
        if past_prompt and load.budget < 1 and seen > self.prompt + load.delay:
            keep = max(load.floor, math.ceil(load.budget * seen))
        elif load.prefill and not past_prompt:
            # A quarter of the bound goes whenever it is reached.
            keep = seen if seen - self.freed * size < load.prefill else load.prefill * 3 // 4
        else:
            return 0
        return max(0, (seen - self.freed * size - keep) // size)


@dataclass(frozen=True)
class Step:
    """What a step computes.

    Attributes:
        prompt: tokens of prompts. pairs: of a prompt's query and a key it attends to. decodes: requests that
            generate. read: keys that those attend to.
    """

    prompt: int
    pairs: int
    decodes: int
    read: int


@dataclass
class Outcome:
    """What came of it. Seconds; ``sums``: of all steps, in the order of :class:`Step`, their number first."""

    tok_per_s: float
    wall_s: float
    first_token_s: float
    running_mean: float
    running_max: int
    preemptions: int
    sums: tuple[float, ...]


@dataclass
class _Server:
    pool: Pool
    waiting: deque[Request]
    running: list[Request] = field(default_factory=list)
    free: int = 0
    preemptions: int = 0

    def resize(self, request: Request, tokens: int) -> bool:
        """Give it the blocks for so many tokens seen; whether there were enough."""
        wanted = math.ceil(tokens / self.pool.block_size) - request.freed - request.blocks
        if wanted > self.free:
            return False
        self.free -= wanted
        request.blocks += wanted
        return True

    def evict(self, request: Request) -> None:
        gone = request.excess(self.pool.block_size)
        request.freed += gone
        request.blocks -= gone
        self.free += gone

    def release(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = request.freed = request.computed = 0
        self.running.remove(request)

    def preempt(self) -> None:
        youngest = self.running[-1]
        self.release(youngest)
        self.waiting.appendleft(youngest)
        self.preemptions += 1

    def plan(self) -> list[tuple[Request, int]]:
        """Requests of the next step, and how many tokens of each are computed."""
        left, before = self.pool.max_batched, self.preemptions
        batch: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request not in self.running or not left:
                continue
            self.evict(request)
            tokens = min(left, max(1, request.wanted - request.computed), self._chunk(request))
            while not self.resize(request, request.computed + tokens):
                mine = request is self.running[-1]
                self.preempt()
                batch = [one for one in batch if one[0] in self.running]
                if mine:
                    break
            else:
                batch.append((request, tokens))
                left -= tokens
        while (
            self.waiting
            and left
            and len(self.running) < self.pool.max_seqs
            and self.preemptions == before
        ):
            request = self.waiting[0]
            if self._to_hold(request) + self._promised() > self.free:
                break
            self.waiting.popleft()
            self.running.append(request)
            tokens = min(left, request.wanted, self._chunk(request))
            self.resize(request, tokens)
            batch.append((request, tokens))
            left -= tokens
        return batch

    def _chunk(self, request: Request) -> int:
        return request.load.prefill // 4 or self.pool.max_batched

    def _to_hold(self, request: Request) -> int:
        """Blocks that its prompt takes at most."""
        bound = (
            request.load.prefill + self._chunk(request) if request.load.prefill else request.wanted
        )
        return math.ceil(min(request.wanted, bound) / self.pool.block_size)

    def _promised(self) -> int:
        """Blocks that prompts which are being computed have yet to take."""
        return sum(
            max(0, self._to_hold(one) - one.blocks)
            for one in self.running
            if one.computed < one.prompt
        )


def held_tokens(prompt: int, output: int, load: Load, block_size: int = 32) -> float:
    """Tokens that a request holds, the mean over the steps in which it generates."""
    request, held = Request(prompt, output, load, computed=prompt), []
    for _ in range(output):
        request.computed += 1
        request.freed += request.excess(block_size)
        held.append(request.computed - request.freed * block_size)
    return fmean(held)


def simulate(requests: Sequence[Request], pool: Pool, seconds: Callable[[Step], float]) -> Outcome:
    """Serve all requests to their ends.

    Args:
        seconds: how long a step takes.

    Raises:
        ValueError: a request does not fit into the pool, even alone.
    """
    server = _Server(pool, deque(requests), free=pool.blocks)
    now, running, tokens = 0.0, list[int](), 0
    sums = [0.0] * 5
    while server.waiting or server.running:
        batch = server.plan()
        if not batch:
            raise ValueError(
                f"a request of {server.waiting[0].wanted} tokens does not fit into {pool}"
            )
        size = pool.block_size
        step = Step(
            sum(n for one, n in batch if one.computed < one.wanted - 1),
            sum(n * (one.computed - one.freed * size) + n * (n + 1) // 2
                for one, n in batch if one.computed < one.wanted - 1),
            sum(one.computed >= one.wanted - 1 for one, _ in batch),
            sum(one.computed + 1 - one.freed * size for one, _ in batch if one.computed >= one.wanted - 1),
        )  # fmt: skip
        now += seconds(step)
        sums = [
            a + b
            for a, b in zip(
                sums, (1, step.prompt, step.pairs, step.decodes, step.read), strict=True
            )
        ]
        running.append(len(server.running))
        for request, count in batch:
            request.computed += count
            if request.computed >= request.wanted:
                request.generated += 1
                tokens += 1
                request.first = now if request.first is None else request.first
                if request.generated == request.output:
                    server.release(request)
    first = percentile([one.first or now for one in requests], 0.5)
    return Outcome(tokens / now if now else 0.0, now, first, fmean(running), max(running),
                   server.preemptions, tuple(sums))  # fmt: skip
