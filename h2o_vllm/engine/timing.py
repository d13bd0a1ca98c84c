# SPDX-License-Identifier: Apache-2.0
"""Measures the evictions of a worker, and sends the time to the engine core. Worker and engine core.

With several workers, it is the time of the worker whose output vLLM keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from h2o_vllm.engine.output_attributes import with_attribute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from h2o_vllm.blocks.plan import Eviction

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
        stop = self.start()
        yield
        self._seconds = stop()

    def start(self) -> Callable[[], Callable[[], float | None]]:
        """Begin to measure.

        Returns:
            a function that ends the measurement. It returns a function that gives the seconds, to be called
            when the output of the step is on the host; ``None`` if they are unknown.
        """
        started = time.perf_counter()

        def stop() -> Callable[[], float]:
            seconds = time.perf_counter() - started
            return lambda: seconds

        return stop

    def attach(self, output: Any) -> Any:
        """``output`` of the step, with the time measured since the last call, if any."""
        seconds, self._seconds = self._seconds, None
        return output if seconds is None else with_attribute(output, ATTRIBUTE, seconds)
