# SPDX-License-Identifier: Apache-2.0
"""Which tokens the evictions of traced requests take. Worker process; on GPUs see ``cuda/trace.py``.

Positions lie in little pages like a layer's KV, heads of one element wide, and the kernel that moves the KV
moves them, by the same scores, and gives lanes to the same heads: what a trace says is what the kernel does.
Ranks of tensor parallelism tell each other what their heads lost, then stages of a pipeline what their layers
lost, as only one worker answers the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from h2o_vllm.blocks.trace import TracedEviction
from h2o_vllm.engine.output_attrs import noted
from h2o_vllm.engine.portion import of_all_stages
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.lanes import own_lanes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm.v1.outputs import ModelRunnerOutput

    from h2o_vllm.blocks.plan import Eviction, EvictionParams

__all__ = ["ATTRIBUTE", "HeadsOfAllRanks", "Ranked", "TraceRecorder", "traced_evictions"]

ATTRIBUTE = "h2o_traced_evictions"


def traced_evictions(output: ModelRunnerOutput) -> tuple[TracedEviction, ...]:
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
    """Follows positions through compaction, and hands over what was lost with each step's output.

    Args:
        of_all_ranks: makes what all heads lost of what this rank's heads did.
    """

    def __init__(self, of_all_ranks: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._of_all_ranks = of_all_ranks
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

    def follows(self, request_id: str) -> bool:
        """Whether a request is traced."""
        return request_id in self._ranked

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
        blocks = [*eviction.heavy_blocks, *eviction.doomed_blocks]
        self._noted.append(self.follow(ranked, eviction, scores[:, blocks], owners))

    def follow(
        self,
        ranked: Ranked,
        eviction: Eviction,
        scores: torch.Tensor,
        owners: torch.Tensor | None,
    ) -> TracedEviction:
        """What an eviction takes of what ``ranked`` says, which then says what is left.

        Args:
            scores: of its heavy blocks, then of its doomed ones, [L, n, KH, BS], float32, on the host.
            owners: see :meth:`record`.
        """
        # The same also where a preempted request evicts for the first time again.
        first = ranked.begins in (None, eviction.fresh_from)
        if first:
            ranked.begins = eviction.fresh_from
            ranked.positions.clear()
        layers, _, heads, block_size = scores.shape
        assert scores.is_cpu
        for number, block in enumerate(eviction.fresh_blocks):
            start = eviction.fresh_from + number * block_size
            fresh = torch.arange(start, start + block_size, dtype=torch.int32)
            ranked.positions[block] = fresh.expand(layers, heads, block_size)
        heavy, doomed = list(eviction.heavy_blocks), list(eviction.doomed_blocks)
        before = torch.stack([ranked.positions[block] for block in [*heavy, *doomed]], dim=1)
        after, now = _compacted(before, scores, len(heavy), owners)
        for place, block in enumerate(heavy):
            ranked.positions[block] = after[:, place]
        for block in doomed:
            del ranked.positions[block]
        lost = _held(before, owners, eviction.seen) & ~_held(after, now, eviction.seen)
        everywhere = self._of_all_ranks(lost).numpy()
        return TracedEviction.of(eviction.request_id, eviction.seen, first=first, lost=everywhere)

    def attach(self, output: Any) -> Any:
        """``output`` of the step, with what was noted since the last call, if anything."""
        if not self._noted:
            return output
        noted_evictions, self._noted = tuple(self._noted), []
        return noted(output, ATTRIBUTE, lambda: noted_evictions)


@dataclass(frozen=True)
class HeadsOfAllRanks:
    """Joins what workers know of their layers and KV heads. Each has to call, in the same order.

    Every eviction comes to all workers in the plan of its step, and so does which requests are traced.

    Args:
        ranks: of tensor parallelism. kv_heads: of the model; where they are fewer than ranks, several
            neighbours hold the same one. stages: of the pipeline.
    """

    ranks: int
    kv_heads: int
    stages: int = 1

    @property
    def distinct_ranks(self) -> int:
        """How many ranks together hold each head once."""
        return min(self.ranks, self.kv_heads)

    def __call__(self, lost: torch.Tensor) -> torch.Tensor:
        """[L of this stage, KH of this rank, n] -> [L, KH, n], bool."""
        return torch.cat(of_all_stages(self._of_all_heads(lost), self.stages))

    def _of_all_heads(self, lost: torch.Tensor) -> torch.Tensor:
        if self.ranks == 1:
            return lost
        own = lost.to(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        torch.distributed.all_gather(parts, own, group=get_tp_group().cpu_group)
        return torch.cat(parts[:: self.ranks // self.distinct_ranks], dim=1).bool()


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
