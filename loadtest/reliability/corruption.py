# SPDX-License-Identifier: Apache-2.0
"""Hunt for silent corruption: what a request says among 200 others must be what it says alone.

    python -m loadtest.reliability.corruption [--requests 200] [--rounds 4] [--seed 0] [--model embedded]
        [--self-check]

A real engine in this process, float32, asynchronous scheduling, chunked prompts, prefix caching, and a pool
so small that requests keep preempting each other. Random budgets, policies, lengths and shared prefixes; some
requests are aborted after a random number of steps. Freed blocks are poisoned (see :mod:`.poison`),
and the pool's books are checked after every step. Prints a line of JSON; exit code 1 if a single token of a
single request differs.

``--self-check`` plants bugs and expects to find each: a hunt that cannot fail would prove nothing.

Linear layers are computed in float64: in float32 their rounding depends on how many rows share a batch, which
now and then decides between two tokens, or two keys of equal score, and is no corruption. vLLM's attention
divides its work by the batch, too; where that decides between two tokens of the same probability (within
``TIE``), the request counts as a tie, not as wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.common.tiny_model import make_tiny_model
from loadtest.reliability.crowd import CROWDS, Ask, make_asks
from loadtest.reliability.exact_linear import exact_linear_layers
from loadtest.reliability.planted_bugs import PLANTED, nothing

__all__ = ["Hunt", "Result", "main"]

BLOCK_SIZE = 16
FLOOR = 32
CHUNK = 256
TIE = 1e-3
"""Nats between what a request said and what it says alone, below which neither is wrong."""


@dataclass
class Result:
    """What a round was and what it found. ``wrong`` must be empty, ``ties`` few.

    ``both``: how often a request was preempted in the very step that had already evicted from it.
    """

    requests: int = 0
    aborted: int = 0
    steps: int = 0
    tokens: int = 0
    running_max: int = 0
    preemptions: int = 0
    evictions: int = 0
    both: int = 0
    cached_tokens: int = 0
    poisoned_blocks: int = 0
    seconds: float = 0.0
    ties: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


class Hunt:
    """An engine of its own, its poison, and what its requests say alone."""

    def __init__(self, model: str, num_blocks: int) -> None:
        # In one process: books, poison and planted bugs need both scheduler and worker at hand.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        exact_linear_layers()
        from vllm import LLM

        from h2o_vllm.plugin import engine_args
        from loadtest.reliability.async_cpu import schedule_asynchronously
        from loadtest.reliability.poison import Poison

        schedule_asynchronously()

        args = engine_args(kv_min_tokens=FLOOR) | {
            "block_size": BLOCK_SIZE,
            "distributed_executor_backend": "uni",
        }
        self._llm = LLM(
            model,
            **args,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=256,
            max_num_batched_tokens=CHUNK,
            num_gpu_blocks_override=num_blocks,
            kv_cache_memory_bytes=1 << 30,
            seed=0,
            # Whom it preempts may have had its turn in the same step, eviction included.
            scheduling_policy="priority",
        )
        self._engine: Any = self._llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        assert self._core.batch_queue is not None, "asynchronous scheduling is not on"
        self._scheduler = self._core.scheduler
        self.worker = self._engine.model_executor.driver_worker.worker
        self._poison = Poison(self._scheduler, self.worker)
        self._alone: dict[tuple[Any, ...], list[int]] = {}
        self._number = 0

    def alone(self, asks: Sequence[Ask]) -> None:
        """Let each request speak alone, in an empty engine with an empty prefix cache."""
        for ask in asks:
            key = _key(ask)
            if key not in self._alone:
                self._alone[key] = self._run([dataclasses.replace(ask, arrives=0, leaves=None)])[0]
                assert self._scheduler.reset_prefix_cache()

    def together(self, asks: Sequence[Ask], *, judge: bool = True) -> Result:
        """Let all speak at once, and compare. :meth:`alone` must have heard them before.

        ``judge`` tells ties from what is wrong, for which a request has to speak alone once more.
        """
        started, result = time.monotonic(), Result(requests=len(asks))
        poisoned = self._poison.count
        said = self._run(asks, result)
        result.poisoned_blocks = self._poison.count - poisoned
        result.seconds = round(time.monotonic() - started, 1)
        assert self._scheduler.reset_prefix_cache()
        for number, (ask, tokens) in enumerate(zip(asks, said, strict=True)):
            expected = self._alone[_key(ask)]
            result.tokens += len(tokens)
            if ask.leaves is None or len(tokens) == len(expected):
                right = tokens == expected
            else:
                result.aborted += 1
                right = tokens == expected[: len(tokens)]
            if not right:
                pairs = zip(tokens, expected, strict=False)
                first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                margin = math.inf
                if judge and first is not None:
                    margin = self._margin(ask, first, tokens[first])
                if margin < TIE:
                    result.ties += 1
                    continue
                result.wrong.append(
                    f"request {number}: {len(ask.prompt)} + {ask.max_tokens} tokens, {ask.asked}, "
                    f"token {first} of {len(tokens)} is less likely than the right one by {margin:.3g}"
                )
        return result

    def _margin(self, ask: Ask, place: int, token: int) -> float:
        """How much likelier, alone, what it says there is than ``token``, in nats."""
        self._number += 1
        params = _params(ask, logprobs=20)
        self._engine.add_request(f"{self._number}", {"prompt_token_ids": list(ask.prompt)}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                entries = output.outputs[0].logprobs
        assert self._scheduler.reset_prefix_cache()
        likely = {number: entry.logprob for number, entry in entries[place].items()}
        # Among the twenty likeliest, or far off. NaN is what nothing is likelier than.
        margin = max(likely.values()) - likely.get(token, -math.inf)
        return math.inf if math.isnan(margin) else margin

    def _run(self, asks: Sequence[Ask], result: Result | None = None) -> list[list[int]]:
        result = result if result is not None else Result()
        names = {}
        for index in range(len(asks)):
            self._number += 1
            names[f"{self._number}"] = index
        said: list[list[int]] = [[] for _ in asks]
        waiting = sorted(names, key=lambda name: asks[names[name]].arrives)
        leaving: dict[str, int] = {}
        step = 0
        while waiting or self._engine.has_unfinished_requests():
            while waiting and asks[names[waiting[0]]].arrives <= step:
                name = waiting.pop(0)
                ask = asks[names[name]]
                prompt = {"prompt_token_ids": list(ask.prompt)}
                self._engine.add_request(name, prompt, _params(ask), priority=ask.priority)
                if ask.leaves is not None:
                    leaving[name] = step + ask.leaves
            for output in self._engine.step():
                said[names[output.request_id]] = list(output.outputs[0].token_ids)
                if output.finished:
                    leaving.pop(output.request_id, None)
                    result.cached_tokens += output.num_cached_tokens or 0
            for name in [name for name, when in leaving.items() if when <= step]:
                self._engine.abort_request([name])
                del leaving[name]
            self._look(result)
            step += 1
        self._scheduler.blocks.check_integrity(idle=True)
        result.steps += step
        return said

    def _look(self, result: Result) -> None:
        self._scheduler.blocks.check_integrity()
        result.running_max = max(result.running_max, len(self._scheduler.running))

    @contextlib.contextmanager
    def counting(self, result: Result) -> Iterator[None]:
        """Count preemptions and evictions that happen inside."""
        scheduler = self._scheduler
        preempt, take = scheduler._preempt_request, scheduler.blocks.take_evictions

        def preempting(request: Any, *args: Any, **kwargs: Any) -> Any:
            result.preemptions += 1
            result.both += request.request_id in scheduler.blocks._evictions
            return preempt(request, *args, **kwargs)

        def taking() -> Any:
            evictions = take()
            result.evictions += len(evictions)
            return evictions

        scheduler._preempt_request, scheduler.blocks.take_evictions = preempting, taking
        try:
            yield
        finally:
            scheduler._preempt_request, scheduler.blocks.take_evictions = preempt, take

    def close(self) -> None:
        """Stop the engine."""
        self._engine.engine_core.shutdown()


def _key(ask: Ask) -> tuple[Any, ...]:
    return ask.prompt, json.dumps(ask.asked), ask.max_tokens


def _params(ask: Ask, logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        ignore_eos=True,
        max_tokens=ask.max_tokens,
        extra_args=ask.asked,
        logprobs=logprobs,
        detokenize=False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Hunt; 0 if every request said what it says alone."""
    args = _arguments(argv)
    with tempfile.TemporaryDirectory() as scratch:
        if args.model == "embedded":
            from h2o_vllm.models import default_model_dir

            model = str(default_model_dir())
        else:
            model = args.model or str(make_tiny_model(Path(scratch)))
        hunt = Hunt(model, args.blocks)
    import torch

    torch.set_num_threads(args.threads)
    failed = False
    for number in range(args.rounds):
        crowd = args.crowds[number % len(args.crowds)]
        asks = make_asks(random.Random(args.seed + number), args.requests, CROWDS[crowd])
        started = time.monotonic()
        hunt.alone(asks)
        alone = round(time.monotonic() - started, 1)
        counts = Result()
        with hunt.counting(counts):
            result = hunt.together(asks)
        result.preemptions, result.evictions = counts.preemptions, counts.evictions
        result.both = counts.both
        failed |= bool(result.wrong)
        row = {"seed": args.seed + number, "crowd": crowd, "seconds_alone": alone}
        print(json.dumps(row | dataclasses.asdict(result)), flush=True)
    if args.self_check:
        asks = make_asks(random.Random(args.seed), args.requests, CROWDS["mixed"])[:40]
        hunt.alone(asks)
        # Nothing last: none of them may have left anything behind.
        for plant in (*PLANTED, nothing):
            with plant(hunt):
                # Alone it would have the bug, too.
                wrong = len(hunt.together(asks, judge=False).wrong)
            failed |= (wrong == 0) is (plant is not nothing)
            row = {"planted": plant.__name__.strip("_"), "requests": len(asks), "wrong": wrong}
            print(json.dumps(row), flush=True)
    hunt.close()
    return int(failed)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.reliability.corruption", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--requests", type=int, default=200, help="requests of a round (%(default)s)")
    add("--rounds", type=int, default=1, help="rounds, each with its own seed (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the first round (%(default)s)")
    add("--blocks", type=int, default=190, help="blocks of 16 tokens in the pool (%(default)s)")
    add("--crowds", nargs="+", choices=CROWDS, default=list(CROWDS), help="kinds, a round each in turn; "
        "mixed: prompts of up to 200 tokens; growing: short prompts and long outputs, so that many run and "
        "then take each other's blocks; default: both")  # fmt: skip
    add("--threads", type=int, default=1, help="threads that compute (%(default)s)")
    add("--model", help="a directory, or 'embedded'; a tiny one of random weights if not given")
    add("--self-check", action="store_true", help="also plant bugs and expect to find them")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
