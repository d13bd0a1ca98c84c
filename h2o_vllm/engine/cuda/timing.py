# SPDX-License-Identifier: Apache-2.0
"""The time that the GPU takes for a step's evictions. Worker process; never waits for the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from h2o_vllm.engine.timing import EvictionTimer

if TYPE_CHECKING:
    from collections.abc import Callable


class DeviceTimer(EvictionTimer):
    """Measures by CUDA events before and after the evictions, on their stream.

    The events are read with the step's output. That waits for the sampled tokens, which come later in the
    stream.
    """

    def start(self) -> Callable[[], Callable[[], float | None]]:
        """As the base class; the time is measured between two points of the stream."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()

        def stop() -> Callable[[], float | None]:
            last.record()
            # ``elapsed_time`` raises for an event that the stream has not reached.
            return lambda: first.elapsed_time(last) / 1000 if last.query() else None

        return stop
