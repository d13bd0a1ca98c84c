# SPDX-License-Identifier: Apache-2.0
"""The state of a worker: which requests evict, the scores, and the KV of the scores.

One instance per worker, shared with the metadata builder and the attention layers. Nothing in here
waits for a device: with async scheduling the worker runs ahead of it.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from h2o_vllm.blocks.plan import Eviction, StepPlan
from h2o_vllm.engine.worker.rescoring import Rescorer
from h2o_vllm.engine.worker.rows import StepRows


@dataclass(kw_only=True)
class WorkerState(Rescorer):
    """Scores and their bookkeeping; subclasses know the device's kernels and the runner's batch.

    Attributes:
        kv_cache_group: index of vLLM's KV cache group whose layers these are.
        in_step: whether a real step (not a warm-up) is being executed.
    """

    kv_cache_group: int
    in_step: bool = False

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.scores.shape[3]

    @abstractmethod
    def start(self, plan: StepPlan) -> None:
        """Store the parameters of requests that enter the batch."""

    def restart(self, request_ids: Iterable[str]) -> None:
        """Requests return after a preemption: their KV is computed anew. Unknown ids are fine."""

    @abstractmethod
    def rows(self, common: Any) -> StepRows | None:
        """The rows of vLLM's ``CommonAttentionMetadata``, or ``None`` if none of them evicts."""

    def compact(self, evictions: Sequence[Eviction]) -> None:
        """Move the survivors of the doomed blocks into the heavy ones, in every layer and head.

        Tokens that were never ranked get their scores first. Call it before the forward pass of the step
        that carries the evictions, see :class:`h2o_vllm.blocks.plan.StepPlan`. Evictions that have blocks in
        common take turns, in order: the scores that one computes are not valid for another.
        """
        for wave in waves(evictions):
            moving = [eviction for eviction in wave if eviction.moves]
            self.rescore(moving)
            for eviction in moving:
                if eviction.places:
                    self._empty(eviction)
            if moving:
                self._move_tokens(moving)

    def _empty(self, eviction: Eviction) -> None:
        """Rank the old content of a settling segment's heavy blocks below all tokens of the segment.

        NaN and minus infinity become the lowest finite float32 in the segment; in the heavy blocks all scores
        become minus infinity.
        """
        lowest = torch.finfo(torch.float32).min
        settling, into = (
            self.to_device(torch.tensor(blocks))
            for blocks in (eviction.doomed_blocks, eviction.heavy_blocks)
        )
        scores = self.scores.index_select(1, settling)
        self.scores.index_copy_(1, settling, scores.nan_to_num_(nan=lowest, neginf=lowest))
        self.scores.index_fill_(1, into, -torch.inf)

    def keep_early(self, blocks: Sequence[int]) -> None:
        """Copy the scores in ``blocks`` to ``early``, before a forward pass in which late queries begin.

        Layer by layer: all layers of a prompt of 100,000 tokens would take 100 MB.
        """
        if blocks:
            index = self.to_device(torch.tensor(blocks))
            for scores, early in zip(self.scores, self.early, strict=True):
                early.index_copy_(0, index, scores.index_select(0, index))

    def start_tokens(self, rows: StepRows, slot_mapping: torch.Tensor) -> None:
        """Let the scores of this step's tokens, where attention is collected, begin at zero in both planes.

        Args:
            slot_mapping: where the batch's KV goes, ``block_id * BS + offset``, int64, on the device.
        """
        tokens = rows.new_tokens()
        if isinstance(tokens, slice) or tokens.size:
            places = tokens if isinstance(tokens, slice) else self.to_device(tokens)
            self._reset(self.planes.flatten(0, 1), slot_mapping[places])

    def confirm(self, computed: Mapping[str, int]) -> None:
        """Add the attention of the previous step's accepted drafts to the scores; see :class:`.StepPlan`."""

    def expect(self, request_ids: Iterable[str], drafted: Collection[str] = ()) -> None:
        """Begin a step that computes tokens of these requests; those in ``drafted`` have drafts."""

    def finish_step(self) -> None:
        """After the forward pass."""

    @abstractmethod
    def _reset(self, scores: torch.Tensor, slots: torch.Tensor) -> None:
        """Set those of ``slots``, [T], in [L, N, KH, BS] to zero."""

    @abstractmethod
    def _move_tokens(self, evictions: Sequence[Eviction]) -> None:
        """Compact evictions that have heavy blocks, by the scores as they are; no two rank one block."""


def waves(evictions: Iterable[Eviction]) -> list[list[Eviction]]:
    """Divide a step's evictions into groups. Two evictions of one group never rank or write the same block.

    Evictions that have a block in common keep their order: the earlier one is in an earlier group.

    Each token has one score. If two evictions rank the same block, each computes its own scores, so the
    first must have moved its tokens before the second computes scores. If a segment settles into a block that
    another eviction of the step freed, that eviction must have read the block before. Both are rare (see
    :class:`h2o_vllm.blocks.plan.StepPlan`): there is nearly always one group.
    """
    found: list[list[Eviction]] = []
    turns: dict[int, int] = {}
    for eviction in evictions:
        turn = max((turns.get(block, 0) for block in eviction.ranked_blocks), default=0)
        if turn == len(found):
            found.append([])
        found[turn].append(eviction)
        turns.update(dict.fromkeys(eviction.ranked_blocks, turn + 1))
    return found
