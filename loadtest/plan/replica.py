# SPDX-License-Identifier: Apache-2.0
"""One engine in simulated time: the real scheduler, modelled step times, made-up tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from vllm.v1.outputs import ModelRunnerOutput

from h2o_vllm.config.keys import REPORT_KEY
from loadtest.plan.scheduling import EngineSettings, make_request, make_scheduler
from loadtest.plan.work import Work, work_of

__all__ = ["Job", "PoolError", "Replica", "Step", "StepTime"]


class PoolError(ValueError):
    """The pool cannot hold a request of the model's longest context; vLLM would not start."""


class StepTime(Protocol):
    """How long steps take."""

    def seconds(self, work: Work) -> float:
        """Of one step."""


@dataclass
class Job:
    """One request, and what became of it. Times are simulated seconds.

    Attributes:
        at: when it arrives.
        fields: what it asks of us; none for vLLM's defaults.
        first, end: when its first and its last token came.
        lossless: whether nothing was evicted from it, once it has ended.
    """

    number: int
    at: float
    prompt_tokens: int
    output_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    first: float = math.nan
    end: float = math.nan
    preemptions: int = 0
    lossless: bool = True

    @property
    def ended(self) -> bool:
        """Whether it was served to the end."""
        return not math.isnan(self.end)


class Step(NamedTuple):
    """When it ended, how long it took, how many requests were running, generated tokens, pool in use."""

    end: float
    seconds: float
    running: int
    tokens: int
    usage: float


class _InFlight(NamedTuple):
    end: float
    seconds: float
    output: Any
    result: ModelRunnerOutput


class Replica:
    """An engine and its clock.

    Attributes:
        now: until when the engine is busy; it decides on its next step then.
        steps: all so far.

    Raises:
        PoolError: see there.
    """

    def __init__(self, settings: EngineSettings, step_time: StepTime) -> None:
        if settings.pool_tokens < settings.max_model_len:
            raise PoolError(
                f"the pool holds {settings.pool_tokens:,} tokens, less than --max-model-len "
                f"{settings.max_model_len:,}"
            )
        self.now = 0.0
        self.steps: list[Step] = []
        self._settings = settings
        self._step_time = step_time
        self._scheduler = make_scheduler(settings)
        self._depth = 2 if settings.pipelined else 1
        self._device_free = 0.0
        self._in_flight: deque[_InFlight] = deque()
        self._jobs: dict[str, tuple[Job, Any]] = {}

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._jobs)

    @property
    def blocks_in_use(self) -> int:
        """Of the pool."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def add(self, job: Job) -> None:
        """Queue a request at its time of arrival, to which the caller has :meth:`advance`-d."""
        if not self._jobs:
            self.now = max(self.now, job.at)
        name = str(job.number)
        fields = job.fields if self._settings.ours else {}
        request = make_request(
            name, job.prompt_tokens, job.output_tokens, fields, self._settings.block_size
        )
        self._jobs[name] = job, request
        self._scheduler.add_request(request)

    def advance(self, until: float) -> None:
        """Take all steps that are decided on before ``until``."""
        while self._jobs and self.now < until:
            self._step()

    def _step(self) -> None:
        while len(self._in_flight) < self._depth and self._decide():
            pass
        if not self._in_flight:
            raise RuntimeError(f"nothing can be scheduled, {len(self._jobs)} requests are left")
        done = self._in_flight.popleft()
        self.now = done.end
        running = len(self._scheduler.running)
        usage = self._scheduler.kv_cache_manager.usage
        tokens = self._deliver(done)
        self.steps.append(Step(done.end, done.seconds, running, tokens, usage))

    def _decide(self) -> bool:
        """Schedule a step; ``False``: there is nothing to compute."""
        output = self._scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        if not names:
            return False
        seconds = self._step_time.seconds(work_of(self._scheduler, output))
        begins = max(self.now, self._device_free)
        self._device_free = begins + seconds
        requests = self._scheduler.requests
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[] if requests[name].is_prefill_chunk else [0] for name in names],
        )
        self._in_flight.append(_InFlight(self._device_free, seconds, output, result))
        return True

    def _deliver(self, done: _InFlight) -> int:
        """Hand the tokens of a step to their requests; returns how many."""
        tokens = 0
        for outputs in self._scheduler.update_from_output(done.output, done.result).values():
            for output in outputs.outputs:
                job, request = self._jobs[output.request_id]
                tokens += len(output.new_token_ids)
                if output.new_token_ids and math.isnan(job.first):
                    job.first = done.end
                if output.finish_reason is not None:
                    self._end(job, request, output)
        return tokens

    def _end(self, job: Job, request: Any, output: Any) -> None:
        job.end = self.now
        job.preemptions = request.num_preemptions
        report = (output.kv_transfer_params or {}).get(REPORT_KEY)
        job.lossless = report is None or report["0"]["squeezed_at"] is None
        del self._jobs[output.request_id]
