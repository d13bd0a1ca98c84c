# SPDX-License-Identifier: Apache-2.0
"""The state of a worker: which requests evict, the scores, and the KV of the scores.

One instance per worker, shared with the metadata builder and the attention layers. Nothing in here
waits for a device: with async scheduling the worker runs ahead of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from h2o_vllm.engine.worker.rescoring import KVReader, Rescorer
from h2o_vllm.engine.worker.waves import waves
from h2o_vllm.policy.formulas import order

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from h2o_vllm.blocks.plan import Eviction, StepPlan
    from h2o_vllm.calibration.file import Part
    from h2o_vllm.engine.worker.rows import StepRows


@dataclass(kw_only=True)
class WorkerState(ABC):
    """Scores and their bookkeeping; subclasses know the device's kernels and the runner's batch.

    Attributes:
        planes: ``[2, L, N, KH, BS]``, float32: ``scores``, see :mod:`h2o_vllm.kernels`, and ``early``.
        scores: the score of each token, by which evictions rank.
        early: the part of a score that comes from queries before the late ones (:meth:`.Policy.late_from`):
            a copy of the score from before the step of the first late query. Valid until the token is first
            ranked.
        kv_cache_group: index of vLLM's KV cache group whose layers these are.
        kv_caches: KV of each evictable layer, ``[N, KH, BS, 2 * D]``.
        first_head: number of the first head of the first of these layers, see :func:`.head_number`.
        calibration: this rank's part of the model's, on the device, if there is one.
        add_ranks: adds up a tensor of each rank of tensor parallelism, in place.
        rescorer: makes scores before an eviction ranks by them.
        in_step: whether a real step (not a warm-up) is being executed.
    """

    read_bytes: ClassVar[int]
    """How much KV is read at once to rank it, as float32."""
    rescored_together: ClassVar[int]
    """How many later evictions of a step are rescored at once."""
    reader_class: ClassVar[type[KVReader]] = KVReader

    planes: torch.Tensor
    scores: torch.Tensor = field(init=False)
    early: torch.Tensor = field(init=False)
    kv_cache_group: int
    kv_caches: Sequence[torch.Tensor]
    first_head: int
    calibration: Part | None = None
    add_ranks: Callable[[torch.Tensor], None] | None = None
    rescorer: Rescorer = field(init=False)
    in_step: bool = False

    def __post_init__(self) -> None:
        self.scores, self.early = self.planes
        self.rescorer = Rescorer(
            scores=self.scores,
            early=self.early,
            reader=self.reader_class(self.kv_caches, self.key_value_views_of),
            to_device=self.to_device,
            first_head=self.first_head,
            calibration=self.calibration,
            add_ranks=self.add_ranks,
            order=self.order,
            read_bytes=self.read_bytes,
            together=self.rescored_together,
        )

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.scores.shape[3]

    @abstractmethod
    def start(self, plan: StepPlan) -> None:
        """Store the parameters of requests that enter the batch."""

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop requests that leave the batch. Unknown ids are fine."""
        self.rescorer.release(request_ids)

    def restart(self, request_ids: Iterable[str]) -> None:  # noqa: B027 - most know nothing of them
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
            self.rescorer.rescore(moving)
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

    def confirm(self, computed: Mapping[str, int]) -> None:  # noqa: B027 - GPUs get no drafts
        """Add the attention of the previous step's accepted drafts to the scores; see :class:`.StepPlan`."""

    def expect(  # noqa: B027 - GPUs ask their slots
        self, request_ids: Iterable[str], drafted: Collection[str] = ()
    ) -> None:
        """Begin a step that computes tokens of these requests; those in ``drafted`` have drafts."""

    def finish_step(self) -> None:  # noqa: B027 - GPUs have nothing left to do
        """After the forward pass."""

    @abstractmethod
    def to_device(self, data: NDArray[Any] | torch.Tensor) -> torch.Tensor:
        """``data``, from the host, where ``scores`` are."""

    @abstractmethod
    def _reset(self, scores: torch.Tensor, slots: torch.Tensor) -> None:
        """Set those of ``slots``, [T], in [L, N, KH, BS] to zero."""

    @staticmethod
    def order(scores: torch.Tensor) -> torch.Tensor:
        """See :func:`.formulas.order`."""
        return order(scores)

    @staticmethod
    @abstractmethod
    def key_value_views_of(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of pages, [M, KH, BS, 2 * D]: their keys and values, [M, KH, BS, D] each."""

    @abstractmethod
    def _move_tokens(self, evictions: Sequence[Eviction]) -> None:
        """Compact evictions that have heavy blocks, by the scores as they are; no two rank one block."""
