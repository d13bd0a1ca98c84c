# SPDX-License-Identifier: Apache-2.0
"""The worker's state on CPU: requests by id, kernels of :mod:`h2o_vllm.kernels.cpu`. Worker process."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from h2o_vllm.engine.cpu.drafts import LaterQueries
from h2o_vllm.engine.cpu.lanes import LaneStore
from h2o_vllm.engine.cpu.reading import PagedTokens
from h2o_vllm.engine.cpu.rows import SharedRows
from h2o_vllm.engine.cpu.views import Look, Views
from h2o_vllm.engine.worker.rows import StepRows
from h2o_vllm.engine.worker.state import WorkerState
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu.batch import key_value_views
from h2o_vllm.policy.ranks import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from h2o_vllm.blocks.plan import Eviction, StepPlan
    from h2o_vllm.calibration.file import Part
    from h2o_vllm.engine.trace import TraceRecorder
    from h2o_vllm.policy.fresh import Tokens


@dataclass(kw_only=True)
class CPUState(WorkerState):
    """Scores and their bookkeeping.

    Attributes:
        row_request_ids: gives the request id of each row of the batch being prepared.
        evicting: request id -> position of the first scored query, for the requests that evict.
        full_kernel: whether our kernels also serve rows without scores.
        sharing: ids of the requests whose heads share slots.
        lanes: which of their heads has which lane, once they have evicted.
        views: what drafts attend to, of requests that draft on a part of their KV.
        recorder: notes what traced requests lose; ``None``: no request may have a trace.
        later: queries of the last step whose tokens were not certain in it, if there are any.
        drafter_caches: KV of each layer of the drafter, in the same blocks; its tokens are not ranked.
    """

    # Of a prompt of 6,000 tokens three layers of a small model, which stay in the cache while they are read.
    # One by one, so that the others have no say in a request's rounding.
    read_bytes: int = 32 << 20

    row_request_ids: Callable[[], Sequence[str]]
    evicting: dict[str, int] = field(default_factory=dict)
    full_kernel: bool = False
    sharing: set[str] = field(default_factory=set)
    lanes: LaneStore = field(init=False)
    views: Views = field(init=False)
    recorder: TraceRecorder | None = None
    later: LaterQueries | None = field(default=None, init=False)
    _expected: set[str] = field(default_factory=set, init=False)
    _drafted: frozenset[str] = field(default=frozenset(), init=False)
    drafter_caches: Sequence[torch.Tensor] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, _, heads, _ = self.scores.shape
        self.lanes = LaneStore(layers, heads)
        self.views = Views(self.scores.shape)

    def warm_up(self, num_heads: int) -> None:
        """Run every kernel once on scratch memory.

        Building or compiling them takes seconds, which must not be the first request's.
        """
        _, num_kv_heads, block_size, width = self.kv_caches[0].shape
        kv_cache = torch.zeros(3, num_kv_heads, block_size, width, dtype=self.kv_caches[0].dtype)
        scores = torch.zeros(1, 3, num_kv_heads, block_size)
        query = torch.zeros(2, num_heads, width // 2, dtype=kv_cache.dtype)
        one, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
        first, table = torch.zeros(1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
        lens = torch.tensor([2], dtype=torch.int32)
        batch = kernels.PagedBatch(query, kv_cache, scores[0], table, lens)
        kernels.attend_decode(batch, first, first, 1.0, torch.empty_like(query))
        kernels.attend_prompt(batch, starts, first, 1.0, torch.empty_like(query))
        kernels.compact([kv_cache], scores, one, one + 1)
        kernels.reset_scores(scores, one.long())
        kernels.order(scores)

    def start(self, plan: StepPlan) -> None:
        """As the base class."""
        for request_id, params in plan.policies.items():
            self.evicting[request_id] = params.first_scored
            if params.shares_heads:
                self.sharing.add(request_id)
        if self.recorder is not None:
            self.recorder.start(plan.policies)
        self.views.start(plan.views)

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop requests that leave the batch. Unknown ids are fine."""
        gone = list(request_ids)
        super().release(gone)
        for request_id in gone:
            self.evicting.pop(request_id, None)
        self.sharing.difference_update(gone)
        self.lanes.drop(gone)
        self.views.release(gone)
        if self.recorder is not None:
            self.recorder.release(gone)

    def restart(self, request_ids: Iterable[str]) -> None:
        """Requests that return after a preemption hold nothing of what they held. Unknown ids are fine."""
        ids = list(request_ids)
        self.lanes.drop(ids)
        self.views.restart(ids)

    def compact(self, evictions: Sequence[Eviction]) -> None:
        """As the base class; a request of which nothing is left to rank has no lanes either."""
        for one in evictions:
            if self.recorder is not None and not one.moves:
                self.recorder.record(one, self.scores)
        super().compact(evictions)
        self.lanes.drop(one.request_id for one in evictions if not one.heavy_blocks)

    def confirm(self, computed: Mapping[str, int]) -> None:
        """As the base class; before anything moves the KV that they attended to."""
        later, self.later = self.later, None
        if later is not None:
            later.confirm(computed)

    def expect(self, request_ids: Iterable[str], drafted: Collection[str] = ()) -> None:
        """As the base class; those that evict have to be met in :meth:`rows`."""
        self._drafted = frozenset(drafted)
        self._expected = {name for name in request_ids if name in self.evicting}

    def finish_step(self) -> None:
        """As the base class.

        Raises:
            RuntimeError: attention took a request that evicts for one that does not.
        """
        if self._expected:
            raise RuntimeError(
                f"h2o: attention did not meet {sorted(self._expected)}, of which blocks are gone: its "
                "answer would come of null blocks"
            )
        self.views.finish_step()

    def shared_rows(self, common: CommonAttentionMetadata) -> SharedRows | None:
        """The rows of this batch whose heads share slots, if there are any."""
        if not len(self.lanes):
            return None
        ids = self.row_request_ids()[: common.num_reqs]
        heavy_blocks = self.lanes.heavy_blocks(ids)
        if not heavy_blocks:
            return None
        return SharedRows(heavy_blocks, self.lanes.of_rows(ids, len(common.seq_lens)))

    def rows(self, common: CommonAttentionMetadata) -> StepRows | None:
        """The rows of this batch, or ``None`` if vLLM's kernel serves all: none of them evicts."""
        if not self.in_step or not (self.evicting or self.full_kernel or len(self.views)):
            return None
        ids = self.row_request_ids()[: common.num_reqs]
        self._expected.difference_update(ids)
        evicts = np.array([request_id in self.evicting for request_id in ids])
        if not (self.full_kernel or evicts.any() or len(self.views)):
            return None
        starts, seq_lens = common.query_start_loc_cpu.numpy(), common.seq_lens.numpy()
        first_scored = [self.evicting.get(request_id, NEVER) for request_id in ids]
        return StepRows.of(evicts, starts, seq_lens, np.array(first_scored, dtype=np.int32))

    def view_rows(
        self, rows: StepRows, origin: NDArray[np.intp] | None, table: torch.Tensor
    ) -> tuple[NDArray[np.bool_], list[Look]]:
        """See :meth:`.Views.begin_step`.

        Args:
            origin: the batch's row that each of ``rows`` comes from, [B]; ``None``: the same one.
        """
        ids = self.row_request_ids()
        places = range(len(rows.evicts)) if origin is None else origin.tolist()
        # Padding rows have no requests.
        names = [ids[place] if place < len(ids) else "" for place in places]
        return self.views.begin_step(names, rows, table)

    def evicting_rows(self, common: CommonAttentionMetadata) -> NDArray[np.bool_]:
        """The rows of this batch whose requests evict, [B]; padding rows do not."""
        evicts = np.zeros(len(common.seq_lens), dtype=np.bool_)
        ids = self.row_request_ids()[: common.num_reqs]
        evicts[: len(ids)] = [request_id in self.evicting for request_id in ids]
        return evicts

    def drafting(self, common: CommonAttentionMetadata, rows: StepRows) -> NDArray[np.bool_]:
        """The rows of this batch that have scored queries and drafts, [B]."""
        has_drafts = np.zeros(len(rows.query_lens), dtype=np.bool_)
        if self._drafted:
            ids = self.row_request_ids()[: common.num_reqs]
            has_drafts[: len(ids)] = [request_id in self._drafted for request_id in ids]
        return has_drafts & rows.scored

    def to_device(self, data: NDArray[Any] | torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return torch.as_tensor(data)

    def _reset(self, scores: torch.Tensor, slots: torch.Tensor) -> None:
        kernels.reset_scores(scores, slots)

    @staticmethod
    def order(scores: torch.Tensor) -> torch.Tensor:
        """As the base class."""
        return kernels.order(scores)

    @staticmethod
    def key_value_views_of(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base class."""
        keys, values = key_value_views(pages)
        return keys.transpose(2, 3), values

    def tokens(self, layers: slice, blocks: torch.Tensor) -> Tokens:
        """As the base class."""
        if not kernels.compiled():
            return super().tokens(layers, blocks)
        return PagedTokens(partial(self.read, layers, blocks), self.kv_caches[layers], blocks)

    def sums(self, part: Part, layers: slice, tokens: Tokens) -> torch.Tensor:
        """As the base class."""
        if not isinstance(tokens, PagedTokens):
            return super().sums(part, layers, tokens)
        weights, constant = part.by_head(self.kv_caches[0].shape[3] // 2, layers)
        given = (tokens.kv_caches, tokens.blocks, weights, *part.rotation)
        return kernels.load().weigh(*given).add_(constant)

    def _empty(self, eviction: Eviction) -> None:
        """As the base class; of the drafter's KV the new blocks get that of the segment's newest blocks."""
        super()._empty(eviction)
        into = list(eviction.heavy_blocks)
        newest = list(eviction.doomed_blocks[-len(into) :])
        for kv_cache in self.drafter_caches:
            kv_cache[into] = kv_cache[newest]

    def _move_tokens(self, evictions: Sequence[Eviction]) -> None:
        for eviction in evictions:
            heavy, doomed = (
                torch.tensor(blocks, dtype=torch.int32)
                for blocks in (eviction.heavy_blocks, eviction.doomed_blocks)
            )
            owners = self._owners(eviction)
            if self.recorder is not None:
                self.recorder.record(eviction, self.scores, owners)
            owners = kernels.compact(self.kv_caches, self.scores, heavy, doomed, owners)
            if owners is not None:
                self.lanes.keep(eviction.request_id, eviction.heavy_blocks, owners)

    def _owners(self, eviction: Eviction) -> torch.Tensor | None:
        """The head that has each lane of the heavy and doomed blocks, [L, n, KH], where heads share slots."""
        if eviction.request_id not in self.sharing:
            return None
        blocks = [*eviction.heavy_blocks, *eviction.doomed_blocks]
        return self.lanes.owners(eviction.request_id, blocks)
