# SPDX-License-Identifier: Apache-2.0
"""Measures the evictions of a worker, and sends the time to the engine core. Worker and engine core.

With several workers, it is the time of the worker whose output vLLM keeps.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.output_attributes import with_attribute

ATTRIBUTE = "h2o_eviction_seconds"


def eviction_seconds(output: object) -> float | None:
    """The seconds in a step's output; ``None`` if the step evicted nothing or they are unknown."""
    seconds: float | None = getattr(output, ATTRIBUTE, None)
    return seconds


class EvictionTimer:
    """Measures in ``execute_model`` of a worker, and attaches the time in ``sample_tokens``.

    It reads the host's clock, for devices whose evictions are complete when the call returns.
    """

    def __init__(self) -> None:
        self._seconds: Callable[[], float | None] | None = None

    @contextmanager
    def measure(self, evictions: Sequence[Eviction]) -> Iterator[None]:
        """Time the block, unless the step evicts nothing."""
        if not evictions:
            yield
            return
        first = self.now()
        yield
        self._seconds = partial(self.between, first, self.now())

    @staticmethod
    def now() -> Any:
        """A point in time."""
        return time.perf_counter()

    @staticmethod
    def between(first: Any, last: Any) -> float | None:
        """Seconds between two points, once the step's output is on the host; ``None`` if they are unknown."""
        seconds: float = last - first
        return seconds

    def attach(self, output: Any) -> Any:
        """``output`` of the step, with the time measured since the last call, if any."""
        seconds, self._seconds = self._seconds, None
        return output if seconds is None else with_attribute(output, ATTRIBUTE, seconds)
