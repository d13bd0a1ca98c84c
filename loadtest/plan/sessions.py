# SPDX-License-Identifier: Apache-2.0
"""Agents of many turns on one GPU: what does the prefix cache give them? Asked of the real scheduler.

    python -m loadtest.plan.sessions --model 8b --gpu h200 --sessions 12 24 48
    python -m loadtest.plan.sessions --pool-tokens 12800 --turns 40 --turn 144+48 --settle 1024 --idle

Each session sends its history and new tokens, waits for the answer, and pauses before the next turn. The real
scheduler and block manager decide what runs in each step, and what the cache gives. No model runs, and a
step's time comes from the GPU's datasheet (``loadtest/plan/cost.py``). ``--idle`` counts instead how many
sessions are found whole in the cache when all have said the same.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from loadtest.common.command import command_parser
from loadtest.common.statistics import percentile
from loadtest.common.tables import markdown_table
from loadtest.plan.arguments import budget, positive, traffic
from loadtest.plan.cost import Server
from loadtest.plan.gpus import GPUS
from loadtest.plan.real import TOKEN, answer, bare_config, dense_scheduler, make_request
from loadtest.plan.shapes import ShapeError, load_shape
from loadtest.plan.simulate import Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from h2o_vllm.engine.core.scheduler import H2OScheduler

__all__ = ["Found", "Session", "Turns", "idle", "main", "serve"]

_PATIENCE = 2
"""Steps in a row that compute nothing."""

VARIANTS = ("stock", "budget", "settled")
"""All KV, as vLLM has it; a budget alone; a budget and ``kv_settle_tokens``."""


@dataclass(frozen=True)
class Turns:
    """What each session does.

    Attributes:
        count: turns. new: tokens that each adds to the history. answer: tokens of each answer.
        thought: those of them that are not sent back. pause: seconds between an answer and the next turn.
    """

    count: int
    new: int
    answer: int
    thought: int = 0
    pause: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of the last prompt and its answer."""
        return self.count * (self.new + self.answer - self.thought) + self.thought


@dataclass
class Session:
    """One session: its number, the history so far and the hashes of its blocks, and its next turn."""

    number: int
    history: list[int] = field(default_factory=list)
    hashes: list[Any] = field(default_factory=list)
    turn: int = 0

    def ask(self, turns: Turns, fields: Mapping[str, Any], block_size: int) -> Request:
        """The request of its next turn. No two sessions, and no two turns, say the same."""
        self.history += [1000 + self.number * turns.count + self.turn] * turns.new
        asked = (list(self.history), turns.answer, dict(fields), block_size, list(self.hashes))
        request = make_request(f"{self.number}-{self.turn}", *asked)
        self.hashes = list(request.block_hashes)
        return request

    def end(self, turns: Turns, request: Request) -> None:
        """Note the answer. If some of it was thought, the rest stands elsewhere, and its KV is another."""
        self.turn += 1
        if turns.thought:
            self.history += [TOKEN + 1] * (turns.answer - turns.thought)
        else:
            self.history += request.output_token_ids
            self.hashes = list(request.block_hashes)


@dataclass
class Found:
    """What came of it.

    Attributes:
        seconds: from the first step's begin to the last one's end. steps: how many there were.
        first_s: from each turn's begin to its first token, seconds.
        cached, asked: tokens of each turn's prompt that the cache gave, and all.
    """

    seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    first_s: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)


def serve(
    scheduler: H2OScheduler,
    sessions: int,
    turns: Turns,
    fields: Mapping[str, Any],
    seconds: Callable[[Step], float],
    lost: int | None = None,
) -> Found:
    """Serve all sessions to their ends; all begin at once.

    Args:
        fields: what their requests ask of us. seconds: how long a step takes.
        lost: end when the cache gives so many tokens less than all that a session has said.

    Raises:
        ValueError: a turn does not fit into the pool, even alone.
    """
    found, size = Found(), scheduler.blocks.block_size
    due = [(0.0, number, Session(number)) for number in range(sessions)]
    waiting: dict[str, tuple[float, Session, Request]] = {}
    stuck = 0
    while due or waiting:
        if not waiting:
            found.seconds = max(found.seconds, due[0][0])
        while due and due[0][0] <= found.seconds:
            at, _, session = heapq.heappop(due)
            request = session.ask(turns, fields, size)
            scheduler.add_request(request)
            waiting[request.request_id] = at, session, request
        output = scheduler.schedule()
        # A request without blocks for a segment that settles preempts itself.
        stuck = 0 if output.num_scheduled_tokens else stuck + 1
        if stuck > _PATIENCE:
            raise ValueError(f"{turns.longest:,} tokens do not fit into the pool")
        for started in output.scheduled_new_reqs:
            found.cached.append(started.num_computed_tokens)
            found.asked.append(waiting[started.req_id][2].num_prompt_tokens)
            if lost is not None and found.cached[-1] + lost < found.asked[-1] - turns.new:
                return found
        found.seconds += seconds(_step(scheduler, output))
        found.steps += 1
        silent = [
            name for name in output.num_scheduled_tokens if not waiting[name][2].num_output_tokens
        ]
        answer(scheduler, output)
        found.first_s += [
            found.seconds - waiting[name][0]
            for name in silent
            if waiting[name][2].num_output_tokens
        ]
        for name in output.num_scheduled_tokens:
            _, session, request = waiting[name]
            if request.is_finished():
                del waiting[name]
                found.preemptions += request.num_preemptions
                session.end(turns, request)
                if session.turn < turns.count:
                    heapq.heappush(due, (found.seconds + turns.pause, session.number, session))
    return found


def _step(scheduler: H2OScheduler, output: SchedulerOutput) -> Step:
    """What a step computes, once it has been planned."""
    prompt = pairs = decodes = read = 0
    for name, count in output.num_scheduled_tokens.items():
        request, state = scheduler.requests[name], scheduler.blocks.eviction_state(name)
        holes = state.holes * scheduler.blocks.block_size if state is not None else 0
        live = request.num_computed_tokens - count - holes
        if count == 1 and request.num_output_tokens:
            decodes, read = decodes + 1, read + live + 1
        else:
            prompt, pairs = prompt + count, pairs + count * live + count * (count + 1) // 2
    return Step(prompt, pairs, decodes, read)


def idle(make: Callable[[], H2OScheduler], turns: Turns, fields: Mapping[str, Any]) -> int:
    """The most sessions that take turns one after the other and find in the cache all that they have said.

    Args:
        make: a scheduler that runs one request at a time. fields: what the requests ask of us.
    """

    def whole(sessions: int) -> bool:
        scheduler = make()
        # The last token has no KV, and a hit never ends where a segment is due.
        lost = 2 * scheduler.blocks.block_size
        found = serve(scheduler, sessions, turns, fields, lambda _: 0.0, lost)
        return len(found.first_s) == sessions * turns.count

    low, high = 0, 1
    while whole(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if whole(middle) else (low, middle)
    return low


def main(argv: Sequence[str] | None = None) -> None:
    """Ask, print."""
    args = parse_arguments(argv)
    try:
        print(counted(args) if args.idle else planned(args))
    except (ShapeError, ValueError) as error:
        raise SystemExit(f"python -m loadtest.plan.sessions: error: {error}") from error


def planned(args: argparse.Namespace) -> str:
    """A line for each number of sessions and variant. Markdown."""
    turns, shape, gpu = _turns(args), load_shape(args.model), GPUS[args.gpu]
    lines = []
    for sessions in args.sessions:
        base = 0.0
        for variant in args.variants:
            # Requests with a budget take memory for scores; settled segments are ranked by keys alone.
            pool = args.pool_tokens or _server(args, scored=variant != "stock").pool_tokens
            seconds = _server(args, scored=variant == "budget").seconds
            scheduler = _scheduler(args, turns, pool, max_seqs=256)
            found = serve(scheduler, sessions, turns, _fields(args, variant), seconds)
            speed = sessions * turns.count * turns.answer / found.seconds
            base = base or speed
            lines.append([
                f"{sessions}", variant, f"{speed:,.0f}", f"{speed / base:.2f}",
                f"{median(found.first_s):.2f}", f"{percentile(found.first_s, 0.99):.1f}",
                f"{sum(found.cached) / sum(found.asked):.1%}", f"{found.preemptions}",
            ])  # fmt: skip
    head = ["sessions", "variant", "tok/s", "over the first", "first token p50 s", "p99 s", "cached",
            "preempted"]  # fmt: skip
    about = (
        f"{shape.name} on {args.gpus} {gpu.name}, bf16; {_about(args)}, {turns.pause:g} s between turns. "
        "Planned by the real scheduler; times are simulated."
    )
    return f"{about}\n\n{markdown_table(head, lines)}"


def counted(args: argparse.Namespace) -> str:
    """A line for each variant that the cache serves: sessions found whole. Markdown."""
    turns, lines, base = _turns(args), [], 0
    pool = args.pool_tokens or _server(args, scored=True).pool_tokens
    for variant in args.variants:
        if variant != "budget":
            make = partial(_scheduler, args, turns, pool, max_seqs=1)
            found = idle(make, turns, _fields(args, variant))
            base = base or found
            lines.append([variant, f"{found}", f"{found / base:.2f}" if base else "-"])
    about = (
        f"A pool of {pool:,} tokens; {_about(args)}. Counted by the real scheduler, no model ran."
    )
    return (
        f"{about}\n\n{markdown_table(['variant', 'sessions found whole', 'over the first'], lines)}"
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.plan.sessions", __doc__)
    add = parser.add_argument
    add("--model", default="8b", help="as loadtest.plan has it")
    add("--gpu", choices=GPUS, default="h200", help="by its datasheet")
    add("--gpus", type=positive, default=1, help="that share the model")
    add("--sessions", type=positive, nargs="+", default=[12, 24, 48], help="at once")
    add("--turns", type=positive, default=40, help="of each session")
    add("--turn", type=traffic, default=(3056, 444), metavar="NEW+OUTPUT", help="tokens of a turn: what is "
        "new in its prompt, and its answer")  # fmt: skip
    add("--thought", type=int, default=0, help="tokens of each answer that are not sent back")
    add("--pause", type=float, default=2.0, help="seconds between an answer and the next turn")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="what serves them")
    add("--budget", type=budget, default=0.2, help="kv_budget")
    add("--settle", type=positive, default=4096, help="kv_settle_tokens")
    add("--idle", action="store_true", help="count the sessions that the cache holds whole")
    add("--pool-tokens", type=int, default=0, help="KV memory; 0: what the GPUs have room for")
    add("--block-size", type=positive, default=16, help="as vLLM's")
    add("--max-num-batched-tokens", type=positive, default=8192, help="as vLLM's")
    return parser.parse_args(argv)


def _turns(args: argparse.Namespace) -> Turns:
    new, said = args.turn
    return Turns(args.turns, new, said, args.thought, args.pause)


def _about(args: argparse.Namespace) -> str:
    new, said = args.turn
    thought = f", of which {args.thought:,} are not sent back" if args.thought else ""
    return (
        f"{args.turns} turns of {new:,} + {said:,} tokens{thought}, kv_budget {args.budget:g}, "
        f"kv_settle_tokens {args.settle:,}"
    )


def _fields(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    settled = {"kv_settle_tokens": args.settle, "kv_policy": "later"}
    return {
        "stock": {"kv_budget": 1.0},
        "budget": {"kv_budget": args.budget, "kv_protect": 0},
        "settled": {"kv_budget": args.budget, **settled},
    }[variant]


def _server(args: argparse.Namespace, *, scored: bool) -> Server:
    return Server(load_shape(args.model), GPUS[args.gpu], args.gpus, scored)


def _scheduler(args: argparse.Namespace, turns: Turns, pool: int, max_seqs: int) -> H2OScheduler:
    length = turns.longest + args.block_size
    config = bare_config(args.block_size, length, max_seqs, args.max_num_batched_tokens)
    return dense_scheduler(config, pool)


if __name__ == "__main__":
    main()
