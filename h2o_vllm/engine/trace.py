# SPDX-License-Identifier: Apache-2.0
"""Which tokens the evictions of traced requests take. Worker process, on CPUs, one for the whole model.

Positions lie in little pages like a layer's KV, heads of one element wide, and the kernel that moves the KV
moves them, by the same scores, and gives lanes to the same heads: what a trace says is what the kernel does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from h2o_vllm.blocks.counts.trace import TracedEviction
from h2o_vllm.blocks.plan import Eviction, EvictionParams
from h2o_vllm.engine.output_attributes import with_attribute
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.lanes import own_lanes

ATTRIBUTE = "h2o_traced_evictions"


def traced_evictions(output: object) -> tuple[TracedEviction, ...]:
    """What :class:`TraceRecorder` attached to a step's output."""
    evictions: tuple[TracedEviction, ...] = getattr(output, ATTRIBUTE, ())
    return evictions


@dataclass
class Ranked:
    """The blocks of one request that evictions have ranked and spared.

    ``positions``: block id -> [L, KH, BS], int32, of the tokens in it, lane by lane. ``begins``: where the
    first eviction began to rank, which tells it from all others.
    """

    begins: int | None = None
    positions: dict[int, torch.Tensor] = field(default_factory=dict)


class TraceRecorder:
    """Follows positions through compaction, and hands over what was lost with each step's output."""

    def __init__(self) -> None:
        self._ranked: dict[str, Ranked] = {}
        self._noted: list[TracedEviction] = []

    def start(self, policies: Mapping[str, EvictionParams]) -> None:
        """Learn which of the requests that enter the batch are traced."""
        for request_id, params in policies.items():
            if params.traced:
                self._ranked[request_id] = Ranked()

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop requests that leave the batch. Unknown ids are fine."""
        for request_id in request_ids:
            self._ranked.pop(request_id, None)

    def record(
        self, eviction: Eviction, scores: torch.Tensor, owners: torch.Tensor | None = None
    ) -> None:
        """Note what an eviction is about to take, if its request is traced.

        Args:
            scores: by which it ranks, [L, N, KH, BS], float32; read only.
            owners: the head of each lane of its heavy and doomed blocks, [L, n, KH], int32, where the
                request's heads share slots.
        """
        ranked = self._ranked.get(eviction.request_id)
        if ranked is None:
            return
        heavy, doomed = list(eviction.heavy_blocks), list(eviction.doomed_blocks)
        scores = scores[:, [*heavy, *doomed]]
        # The same also where a preempted request evicts for the first time again.
        first = ranked.begins in (None, eviction.fresh_from)
        if first:
            ranked.begins = eviction.fresh_from
            ranked.positions.clear()
        layers, _, heads, block_size = scores.shape
        starts = eviction.fresh_starts(block_size)
        for block, start in zip(eviction.fresh_blocks, starts, strict=True):
            fresh = torch.arange(start, start + block_size, dtype=torch.int32)
            ranked.positions[block] = fresh.expand(layers, heads, block_size)
        before = torch.stack([ranked.positions[block] for block in [*heavy, *doomed]], dim=1)
        after, now = _compacted(before, scores, len(heavy), owners)
        for place, block in enumerate(heavy):
            ranked.positions[block] = after[:, place]
        for block in doomed:
            del ranked.positions[block]
        lost = _held(before, owners, eviction.seen) & ~_held(after, now, eviction.seen)
        where = np.array(lost.numpy().nonzero(), dtype=np.uint16)
        self._noted.append(TracedEviction(eviction.request_id, eviction.seen, first, where))

    def attach(self, output: Any) -> Any:
        """``output`` of the step, with what was noted since the last call, if anything."""
        if not self._noted:
            return output
        noted_evictions, self._noted = tuple(self._noted), []
        return with_attribute(output, ATTRIBUTE, lambda: noted_evictions)


def _compacted(
    positions: torch.Tensor, scores: torch.Tensor, heavy: int, owners: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first ``heavy`` blocks when they have taken the best tokens, and which heads have their lanes then.

    Args:
        positions: [L, n, KH, BS], int32. scores: the same shape, float32. owners: [L, n, KH], int32, or
            ``None``: each head's own.
    """
    count, block_size = positions.shape[1], positions.shape[3]
    # K is stored [D, BS], V [BS, D], and D is 1: a page is the positions twice.
    pages = torch.cat([positions, positions], dim=-1).view(torch.float32)
    blocks = torch.arange(count, dtype=torch.int32)
    caches = list(pages.unflatten(-1, (block_size, 2)).unbind())
    now = kernels.compact(caches, scores.clone(), blocks[:heavy], blocks[heavy:], owners)
    return pages.view(torch.int32)[:, :heavy, :, :block_size], now


def _held(positions: torch.Tensor, owners: torch.Tensor | None, length: int) -> torch.Tensor:
    """Which of the first ``length`` positions each layer and head has there, [L, KH, length], bool.

    Args:
        positions, owners: of some blocks, as for :func:`_compacted`.
    """
    layers, count, heads, _ = positions.shape
    if owners is None:
        owners = own_lanes(layers, count, heads)
    held = torch.zeros(layers, heads, length, dtype=torch.bool)
    layer = torch.arange(layers)[:, None, None, None]
    held[layer, owners[..., None].long(), positions.long()] = True
    return held
