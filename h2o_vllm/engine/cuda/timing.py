# SPDX-License-Identifier: Apache-2.0
"""How long the GPU worked on a step's evictions. Worker process; never waits for the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from h2o_vllm.engine.timing import EvictionTimer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeviceTimer"]


class DeviceTimer(EvictionTimer):
    """By CUDA events around the evictions, on the stream that carries them out.

    They are read when the step's output is: the sampled tokens, which that waits for in any case, lie behind
    them in the stream.
    """

    def start(self) -> Callable[[], Callable[[], float | None]]:
        """See the base class; the time is that between the two points of the stream."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()

        def stop() -> Callable[[], float | None]:
            last.record()
            # To ask for the time of an event that has not been reached is an error.
            return lambda: first.elapsed_time(last) / 1000 if last.query() else None

        return stop
