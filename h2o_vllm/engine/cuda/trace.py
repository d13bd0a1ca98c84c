# SPDX-License-Identifier: Apache-2.0
"""Which tokens the evictions of traced requests take, with scores on a GPU. Worker process.

Before tokens move, the scores that an eviction ranks by are copied to the host on the stream. When the step's
output is there, the kernels for CPUs rank them again. Scores alone decide which tokens stay, so the result is
what the GPU kept. Ranks of tensor parallelism send each other the scores of their heads before, on the stream
as well: only one of them is asked for its output. Without traced requests this costs nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group

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
        heads: KV heads of a layer in the model. Where this rank has fewer, all ranks note the same evictions,
            in the same order.
    """

    def __init__(self, to_device: Callable[[torch.Tensor], torch.Tensor], heads: int) -> None:
        super().__init__(lambda lost: lost)
        self._to_device = to_device
        self._heads = heads
        self._copied: list[Callable[[], TracedEviction]] = []

    def record(
        self, eviction: Eviction, scores: torch.Tensor, owners: torch.Tensor | None = None
    ) -> None:
        """As the base class; the tensors may change later in the stream."""
        ranked = self._ranked.get(eviction.request_id)
        if ranked is None:
            return
        blocks = torch.tensor([*eviction.heavy_blocks, *eviction.doomed_blocks])
        everywhere = _to_host(self._of_all_heads(scores.index_select(1, self._to_device(blocks))))
        on_host = None if owners is None else _to_host(owners)
        self._copied.append(partial(self.follow, ranked, eviction, everywhere, on_host))

    def _of_all_heads(self, mine: torch.Tensor) -> torch.Tensor:
        """[L, n, KH of this rank, BS] -> [L, n, KH of the model, BS]."""
        if mine.shape[2] == self._heads:
            return mine
        of_all_ranks = get_tp_group().all_gather(mine, dim=2)
        # Neighbours hold the same head where there are more ranks than heads.
        return of_all_ranks[:, :, :: of_all_ranks.shape[2] // self._heads]

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
