# SPDX-License-Identifier: Apache-2.0
"""How long evictions took in a worker, and how the engine core learns of it. Worker and engine core.

Under tensor parallelism it is the time of the rank whose output vLLM keeps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from h2o_vllm.engine.output_notes import noted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.outputs import ModelRunnerOutput

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
        return output if seconds is None else noted(output, ATTRIBUTE, seconds)
