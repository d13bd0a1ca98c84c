# SPDX-License-Identifier: Apache-2.0
"""Drafts beside scores: what is not certain adds nothing, and what has become certain adds what it is due.

Worker process, CPU only. A row of a batch may hold a request's newest token and drafts of the next ones, of
which the sampler rejects some after the forward pass. Here each query of such a row becomes a row of its own,
as if the tokens came one by one. The first one is certain, and adds to the scores. The others attend, and are
remembered: the next step knows which of them stay, and adds what they give before it evicts anything, in
their order. So scores are those of the same tokens without drafts: to the bit if all drafts are rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from h2o_vllm.engine.cpu.rows import SharedRows
from h2o_vllm.engine.worker.rows import StepRows
from h2o_vllm.policy.ranks import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from h2o_vllm.kernels.cpu import Lanes, PagedBatch


@dataclass(frozen=True)
class LaterQueries:
    """U queries whose tokens are not certain.

    Attributes:
        request_ids: whose they are, [U].
        positions: of their tokens in the sequence; that many tokens lie before, [U].
        order: index of the query within its request, from 1, [U].
        tokens: where they lie in the batch, [U], int64.
        block_table, seq_lens: what they attend to, themselves included, [U, MB] and [U], int32; no holes.
        lanes: whose lanes these blocks have, per layer; ``None``: heads share nothing.
    """

    request_ids: Sequence[str]
    positions: NDArray[np.int32]
    order: NDArray[np.intp]
    tokens: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    lanes: list[Lanes] | None
    _layers: list[tuple[PagedBatch, Callable[..., None]]] = field(default_factory=list)

    def keep(self, batch: PagedBatch, layer: int, attend: Callable[..., None]) -> None:
        """Remember what the queries are in a layer, and how it attends: a kernel for rows of one query."""
        mine = batch._replace(
            query=batch.query[self.tokens],
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            lanes=None if self.lanes is None else self.lanes[layer],
        )
        self._layers.append((mine, attend))

    def confirm(self, computed: Mapping[str, int]) -> None:
        """Let those add to the scores whose tokens are among the ``computed`` first of their requests."""
        known = np.array([computed.get(request_id, 0) for request_id in self.request_ids])
        certain = known > self.positions
        for order in np.unique(self.order[certain]):
            chosen = torch.from_numpy(np.flatnonzero(certain & (self.order == order))).int()
            for batch, attend in self._layers:
                # What they have attended to is in the answer already.
                attend(batch, chosen, chosen, out=torch.empty_like(batch.query))


@dataclass(frozen=True)
class QueriesApart:
    """A batch of B rows in which each query of some rows is a row of its own.

    Attributes:
        rows: of the new batch, B' of them.
        origin: the row that each comes from, [B'].
        behind: how many of its tokens come behind the new row's, [B'], int32.
        later: the new rows whose tokens are not certain, [B'].
    """

    rows: StepRows
    origin: NDArray[np.intp]
    behind: NDArray[np.int32]
    later: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: StepRows, chosen: NDArray[np.bool_]) -> QueriesApart:
        """Take the ``chosen`` rows, [B], apart."""
        counts = np.where(chosen, rows.query_lens, 1)
        origin = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(origin)) - (np.cumsum(counts) - counts)[origin]
        alone = chosen[origin]
        lens = rows.query_lens[origin]
        behind = np.where(alone, lens - 1 - place, 0).astype(np.int32)
        later = alone & (place > 0)
        taken = StepRows(
            evicts=rows.evicts[origin],
            query_lens=np.where(alone, 1, lens).astype(np.int32),
            seq_lens=rows.seq_lens[origin] - behind,
            first_scored=np.where(later, NEVER, rows.first_scored[origin]).astype(np.int32),
        )
        return cls(taken, origin, behind, later)

    def batch(self, live: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The batch of the new rows; ``live`` has no holes."""
        starts = torch.zeros(len(self.origin) + 1, dtype=torch.int32)
        starts[1:] = torch.from_numpy(np.cumsum(self.rows.query_lens))
        index = torch.from_numpy(self.origin)
        return replace(
            live,
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=live.seq_lens[index] - torch.from_numpy(self.behind),
            num_reqs=len(self.origin),
            block_table_tensor=live.block_table_tensor[index],
        )

    def shared(self, shared: SharedRows | None) -> SharedRows | None:
        """The same of rows whose heads share slots."""
        if shared is None:
            return None
        heavy_blocks = {
            row: shared.heavy_blocks[origin]
            for row, origin in enumerate(self.origin.tolist())
            if origin in shared.heavy_blocks
        }
        return SharedRows(heavy_blocks, _of_rows(shared.lanes, torch.from_numpy(self.origin)))

    def later_queries(
        self, batch: CommonAttentionMetadata, shared: SharedRows | None, request_ids: Sequence[str]
    ) -> LaterQueries:
        """The queries of the new batch that are not certain; ``request_ids`` are those of the old rows."""
        later = np.flatnonzero(self.later)
        index = torch.from_numpy(later)
        first = np.searchsorted(self.origin, self.origin[later])
        return LaterQueries(
            request_ids=[request_ids[row] for row in self.origin[later]],
            positions=self.rows.seq_lens[later] - 1,
            order=later - first,
            tokens=torch.from_numpy(self.rows.starts[later]),
            block_table=batch.block_table_tensor[index],
            seq_lens=batch.seq_lens[index],
            lanes=None if shared is None else _of_rows(shared.lanes, index),
        )


def _of_rows(lanes: list[Lanes], index: torch.Tensor) -> list[Lanes]:
    return [one._replace(rows=one.rows[index]) for one in lanes]
