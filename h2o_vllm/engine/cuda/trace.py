# SPDX-License-Identifier: Apache-2.0
"""Which tokens the evictions of traced requests take, with scores on a GPU. Worker process.

Before tokens move, the scores that an eviction ranks by are copied to the host on the stream. When the step's
output is there, the kernels for CPUs rank them again. Scores alone decide which tokens stay, so the result is
what the GPU kept. Without traced requests this costs nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from h2o_vllm.engine.output_attrs import noted
from h2o_vllm.engine.trace import ATTRIBUTE, TraceRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from h2o_vllm.blocks.plan import Eviction
    from h2o_vllm.blocks.trace import TracedEviction

__all__ = ["DeviceTraceRecorder"]


class DeviceTraceRecorder(TraceRecorder):
    """As the base class, but it never waits for the device, and evaluates the copies in :meth:`attach`.

    One thread fetches the outputs of steps, one after the other, in their order.

    Args:
        to_device: copies a host tensor to the device of the scores, without waiting.
    """

    def __init__(self, to_device: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(lambda lost: lost)
        self._to_device = to_device
        self._copied: list[Callable[[], TracedEviction]] = []

    def record(
        self, eviction: Eviction, scores: torch.Tensor, owners: torch.Tensor | None = None
    ) -> None:
        """As the base class; the tensors may change later in the stream."""
        ranked = self._ranked.get(eviction.request_id)
        if ranked is None:
            return
        blocks = torch.tensor([*eviction.heavy_blocks, *eviction.doomed_blocks])
        mine = _to_host(scores.index_select(1, self._to_device(blocks)))
        on_host = None if owners is None else _to_host(owners)
        self._copied.append(partial(self.follow, ranked, eviction, mine, on_host))

    def attach(self, output: Any) -> Any:
        """As the base class."""
        if not self._copied:
            return output
        copied, self._copied = self._copied, []
        there = torch.cuda.Event()
        there.record()
        return noted(output, ATTRIBUTE, partial(_after, there, copied))


def _after(
    there: torch.cuda.Event, copied: list[Callable[[], TracedEviction]]
) -> tuple[TracedEviction, ...]:
    # The step's tokens, which have arrived, come later in the stream: this does not wait.
    there.synchronize()
    return tuple(follow() for follow in copied)


def _to_host(found: torch.Tensor) -> torch.Tensor:
    """A copy on the host. Its contents are valid once the stream has reached this point."""
    on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
    return on_host.copy_(found, non_blocking=True)
