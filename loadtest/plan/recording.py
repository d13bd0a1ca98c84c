# SPDX-License-Identifier: Apache-2.0
"""Schedulers that note what every step computed and how long it took. Engine core.

An engine takes them as its ``scheduler_cls``, and the file they append to in its ``additional_config``.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from h2o_vllm.engine.scheduler import H2OScheduler
from loadtest.plan.fit import MeasuredStep
from loadtest.plan.work import Work, work_of

__all__ = ["STEPS_KEY", "RecordingAsync", "RecordingOurs", "RecordingSync", "read_steps"]

STEPS_KEY = "plan_steps"
"""In ``additional_config``: the file's path."""


class _Recording(Scheduler):
    """Mixed into a scheduler.

    A step lasts until its tokens are known, from when those of the step before were, or from when it was
    decided on where the engine had been idle.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps_file = Path(self.vllm_config.additional_config[STEPS_KEY])
        self._decided: deque[tuple[Work, float]] = deque()
        self._last_end: float | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class."""
        began = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        self._decided.append((work_of(self, output), began))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As the base class; appends a row."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        now = time.perf_counter()
        work, began = self._decided.popleft()
        if work.tokens:
            begin = began if self._last_end is None else self._last_end
            row = {"seconds": now - begin, **asdict(work)}
            with self._steps_file.open("a") as file:
                file.write(f"{json.dumps(row)}\n")
        self._last_end = now if self.has_unfinished_requests() else None
        return outputs


class RecordingSync(_Recording):
    """vLLM's, as it schedules on CPUs."""


class RecordingAsync(_Recording, AsyncScheduler):
    """vLLM's, as it schedules on GPUs."""


class RecordingOurs(_Recording, H2OScheduler):
    """Ours."""


def read_steps(path: Path) -> list[MeasuredStep]:
    """What was appended to a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [MeasuredStep(seconds=row.pop("seconds"), work=Work(**row)) for row in rows]
