# SPDX-License-Identifier: Apache-2.0
"""A real engine in this process in which every request must generate what it generates alone.

Float32, asynchronous scheduling (with drafts synchronous, as everywhere), chunked prompts, prefix caching,
and a pool so small that requests keep preempting each other. Freed blocks are poisoned (see :mod:`.poison`),
and the pool's books are checked after every step.
"""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from loadtest.reliability.exact_linear import exact_linear_layers
from loadtest.reliability.request_mix import TimedRequest

BLOCK_SIZE = 16
FLOOR = 32
CHUNK = 256
DRAFTS = ("none", "exact", "ngram")
"""What drafts: nothing; the model, for requests that keep all their KV; ``ngram``, for all requests."""
TIE = 1e-3
"""Nats between what a request generated and what it generates alone, below which neither is wrong."""


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@dataclass
class Result:
    """What a round was and what it found. ``wrong`` must be empty, ``ties`` few.

    ``both``: how often a request was preempted in the very step that had already evicted from it.
    ``squeezed``: elastic requests that had to fall back to their budgets.
    ``settled``: of the evictions, those of segments.
    """

    requests: int = 0
    aborted: int = 0
    steps: int = 0
    tokens: int = 0
    running_max: int = 0
    preemptions: int = 0
    evictions: int = 0
    settled: int = 0
    both: int = 0
    squeezed: int = 0
    cached_tokens: int = 0
    poisoned_blocks: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    ties: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)


@dataclass
class _Answer:
    """What a request generated, and where its evictions began, if they did."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    squeezed_at: int | None = None


class CorruptionCheck:
    """An engine of its own, its poison, and what its requests generate alone.

    Args:
        full_kernel: kernel for rows without scores, as ``--kv-full-kernel``.
        drafts: one of :data:`DRAFTS`.

    Attributes:
        worker: the engine's, for bugs to be planted in.
    """

    def __init__(
        self, model: str, num_blocks: int, full_kernel: str = "vllm", drafts: str = "none"
    ) -> None:
        self._engine: Any = _start_engine(model, num_blocks, full_kernel, drafts)
        self._exact = drafts == "exact"
        from loadtest.reliability.poison import Poison

        core = self._engine.engine_core.engine_core
        assert (core.batch_queue is None) == (drafts != "none"), "asynchronous without drafts alone"
        self._scheduler = core.scheduler
        self.worker = self._engine.model_executor.driver_worker.worker
        self._poison = Poison(self._scheduler, self.worker)
        self._alone: dict[tuple[Any, ...], list[int]] = {}
        self._number = 0

    def run_alone(self, requests: Sequence[TimedRequest]) -> None:
        """Generate each by itself, in an empty engine with an empty prefix cache."""
        for request in requests:
            key = _key(request)
            if key not in self._alone:
                alone = dataclasses.replace(request, arrives=0, leaves=None)
                self._alone[key] = self._run([alone], Result())[0].tokens
                assert self._scheduler.reset_prefix_cache()

    def compare_batched(
        self,
        requests: Sequence[TimedRequest],
        *,
        planted: contextlib.AbstractContextManager[Any] | None = None,
        find_ties: bool = True,
    ) -> Result:
        """Generate all at once, and compare; :meth:`run_alone` must have had them before.

        Those that were squeezed run alone once more, evicting from the same count on. ``planted``: a bug in
        the batch. ``find_ties`` tells ties from what is wrong, for which a request has to run alone, too.
        """
        started, result = time.monotonic(), Result(requests=len(requests))
        poisoned = self._poison.count
        with planted or contextlib.nullcontext(), self._counting(result):
            answers = self._run([self._asked(request) for request in requests], result)
        result.poisoned_blocks = self._poison.count - poisoned
        result.seconds = round(time.monotonic() - started, 1)
        assert self._scheduler.reset_prefix_cache()
        for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            if answer.squeezed_at is not None and (request.budget or {}).get("kv_elastic"):
                result.squeezed += 1
                request = _replay(request, answer.squeezed_at)  # noqa: PLW2901 - what it came to
                self.run_alone([request])
            self._compare(number, request, answer.tokens, result, find_ties=find_ties)
        return result

    def _asked(self, request: TimedRequest) -> TimedRequest:
        """In a batch what would keep all its KV is exact: alone it ran without drafts."""
        exact = self._exact and request.budget is None
        return dataclasses.replace(request, budget={"kv_exact": True}) if exact else request

    def _compare(
        self,
        number: int,
        request: TimedRequest,
        tokens: list[int],
        result: Result,
        *,
        find_ties: bool,
    ) -> None:
        expected = self._alone[_key(request)]
        result.tokens += len(tokens)
        if request.leaves is not None and len(tokens) != len(expected):
            result.aborted += 1
            expected = expected[: len(tokens)]
        if tokens == expected:
            return
        pairs = zip(tokens, expected, strict=False)
        first = next((i for i, (own, alone) in enumerate(pairs) if own != alone), None)
        margin = math.inf
        if find_ties and first is not None:
            margin = self._margin(request, first, tokens[first])
        if margin < TIE:
            result.ties += 1
            return
        result.wrong.append(
            f"request {number}: {len(request.prompt)} + {request.max_tokens} tokens, {request.budget}, "
            f"token {first} of {len(tokens)} is less likely than the right one by {margin:.3g}"
        )

    def _margin(self, request: TimedRequest, place: int, token: int) -> float:
        """How much likelier, alone, what is generated there is than ``token``, in nats."""
        self._number += 1
        prompt = {"prompt_token_ids": list(request.prompt)}
        self._engine.add_request(f"{self._number}", prompt, _params(request, logprobs=20))
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                entries = output.outputs[0].logprobs
        assert self._scheduler.reset_prefix_cache()
        likely = {number: entry.logprob for number, entry in entries[place].items()}
        # Among the twenty likeliest, or far off. NaN is what nothing is likelier than.
        margin = max(likely.values()) - likely.get(token, -math.inf)
        return math.inf if math.isnan(margin) else margin

    def _run(self, requests: Sequence[TimedRequest], result: Result) -> list[_Answer]:
        names = {}
        for index in range(len(requests)):
            self._number += 1
            names[f"{self._number}"] = index
        answers = [_Answer() for _ in requests]
        waiting = sorted(names, key=lambda name: requests[names[name]].arrives)
        leaving: dict[str, int] = {}
        step = 0
        while waiting or self._engine.has_unfinished_requests():
            while waiting and requests[names[waiting[0]]].arrives <= step:
                name = waiting.pop(0)
                request = requests[names[name]]
                prompt = {"prompt_token_ids": list(request.prompt)}
                params = _params(request)
                self._engine.add_request(name, prompt, params, priority=request.priority)
                if request.leaves is not None:
                    leaving[name] = step + request.leaves
            for output in self._engine.step():
                answer = answers[names[output.request_id]]
                answer.tokens = list(output.outputs[0].token_ids)
                if output.finished:
                    report = output.kv_transfer_params["h2o"]["0"]
                    answer.squeezed_at = report["squeezed_at"]
                    result.drafted += report["tokens_drafted"]
                    result.accepted += report["tokens_accepted"]
                    leaving.pop(output.request_id, None)
                    result.cached_tokens += output.num_cached_tokens or 0
            for name in [name for name, when in leaving.items() if when <= step]:
                answers[names[name]].squeezed_at = self._squeezed_at(name)
                self._engine.abort_request([name])
                del leaving[name]
            self._scheduler.blocks.check_integrity()
            result.running_max = max(result.running_max, len(self._scheduler.running))
            step += 1
        self._scheduler.blocks.check_integrity(idle=True)
        result.steps += step
        return answers

    def _squeezed_at(self, name: str) -> int | None:
        """Of a request that is about to be aborted: its report goes nowhere."""
        for request_id in self._scheduler.requests:
            # The engine makes the names of its clients unique.
            if request_id.partition("-")[0] == name:
                at: int | None = self._scheduler.blocks.eviction_state(request_id).squeezed_at
                return at
        return None

    @contextlib.contextmanager
    def _counting(self, result: Result) -> Iterator[None]:
        """Count preemptions and evictions that happen inside."""
        scheduler = self._scheduler
        preempt, take = scheduler._preempt_request, scheduler.blocks.take_evictions

        def preempting(request: Any, *args: Any, **kwargs: Any) -> Any:
            result.preemptions += 1
            result.both += request.request_id in scheduler.blocks.evictions
            return preempt(request, *args, **kwargs)

        def taking() -> Any:
            evictions = take()
            result.evictions += len(evictions)
            result.settled += sum(bool(one.places) for one in evictions)
            return evictions

        with (
            mock.patch.object(scheduler, "_preempt_request", preempting),
            mock.patch.object(scheduler.blocks, "take_evictions", taking),
        ):
            yield

    def close(self) -> None:
        """Stop the engine."""
        self._engine.engine_core.shutdown()


def _start_engine(model: str, num_blocks: int, full_kernel: str, drafts: str) -> Any:
    # In one process: books, poison and planted bugs need both scheduler and worker at hand.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    exact_linear_layers()
    from vllm import LLM

    from h2o_vllm.engine.cpu import views
    from h2o_vllm.plugin import engine_args
    from loadtest.reliability.async_cpu import schedule_asynchronously

    args = engine_args(
        kv_min_tokens=FLOOR,
        kv_protect=0,
        kv_full_kernel=full_kernel,
        kv_exact_drafts=4 if drafts == "exact" else 0,
    )
    args |= {"block_size": BLOCK_SIZE, "distributed_executor_backend": "uni"}
    if drafts == "none":
        schedule_asynchronously()
    elif drafts == "ngram":
        args["speculative_config"] = NGRAM
    else:
        # Requests are short here, and the model may be tiny: nothing would be drafted.
        views.LEAST = 0
        views.Costs.drafts = lambda _costs, _rate, most: most  # type: ignore[assignment, method-assign]
    return LLM(
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
        # A request that it preempts may have had its turn in the same step, eviction included.
        scheduling_policy="priority",
    ).llm_engine


def _key(request: TimedRequest) -> tuple[Any, ...]:
    return request.prompt, json.dumps(request.budget), request.max_tokens


def _replay(request: TimedRequest, at: int) -> TimedRequest:
    """An elastic request that evicts from ``at`` tokens on, whatever else runs."""
    budget = {key: value for key, value in (request.budget or {}).items() if key != "kv_elastic"}
    return dataclasses.replace(request, budget=budget | {"kv_evict_from": at})


def _params(request: TimedRequest, logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        ignore_eos=True,
        max_tokens=request.max_tokens,
        extra_args=request.budget,
        logprobs=logprobs,
        detokenize=False,
    )
