# SPDX-License-Identifier: Apache-2.0
"""The time that the GPU takes for a step's evictions. Worker process; never waits for the GPU."""

from __future__ import annotations

import torch

from h2o_vllm.engine.timing import EvictionTimer


class DeviceTimer(EvictionTimer):
    """Measures by CUDA events before and after the evictions, on their stream.

    The events are read with the step's output. That waits for the sampled tokens, which come later in the
    stream.
    """

    @staticmethod
    def now() -> torch.cuda.Event:
        """A point in the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def between(first: torch.cuda.Event, last: torch.cuda.Event) -> float | None:
        """As the base class; ``None`` if the stream has not reached ``last``."""
        # ``elapsed_time`` raises for such an event.
        return first.elapsed_time(last) / 1000 if last.query() else None
