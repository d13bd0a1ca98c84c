# SPDX-License-Identifier: Apache-2.0
"""How long evictions took in a worker, and how the engine core learns of it.

Worker and engine core. The time travels as an extra attribute of the step's output, which survives
pickling as ours of ``SchedulerOutput`` does. Under tensor parallelism it is that of the rank whose
output vLLM keeps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from h2o_vllm.blocks.plan import Eviction

__all__ = ["EvictionTimer", "eviction_seconds"]

ATTRIBUTE = "h2o_eviction_seconds"


def eviction_seconds(output: ModelRunnerOutput) -> float | None:
    """What :class:`EvictionTimer` attached; ``None`` if the step evicted nothing."""
    seconds: float | None = getattr(output, ATTRIBUTE, None)
    return seconds


class EvictionTimer:
    """Measures in ``execute_model`` and attaches in ``sample_tokens``, of one worker."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    @contextmanager
    def measure(self, evictions: Sequence[Eviction]) -> Iterator[None]:
        """Time the block, unless the step evicts nothing."""
        if not evictions:
            yield
            return
        started = time.perf_counter()
        yield
        self._seconds = time.perf_counter() - started

    def attach(self, output: Any) -> Any:
        """``output`` of the step, with the time measured since the last call, if any."""
        seconds, self._seconds = self._seconds, None
        if seconds is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _TimedLater(output, seconds)
        if isinstance(output, ModelRunnerOutput):
            # A copy: the empty output is one object for all steps.
            output = copy(output)
            setattr(output, ATTRIBUTE, seconds)
        return output


class _TimedLater(AsyncModelRunnerOutput):
    """An output that is still being copied from the device."""

    def __init__(self, inner: AsyncModelRunnerOutput, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds

    def get_output(self) -> ModelRunnerOutput:
        output = self._inner.get_output()
        setattr(output, ATTRIBUTE, self._seconds)
        return output
