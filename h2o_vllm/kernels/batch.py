# SPDX-License-Identifier: Apache-2.0
"""What attention kernels on GPUs and their reference get: one layer's KV, a batch's queries, owners of lanes.

Runs in workers. Imports torch alone. Letters as in :mod:`.reference`; on CPUs the same is
:class:`.cpu.batch.PagedBatch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerLanes(NamedTuple):
    """The tables of one layer as kernels take them; all ``None`` if no row's heads share slots."""

    rows: Tensor | None = None
    offsets: Tensor | None = None
    pages: Tensor | None = None
    layer: int | None = None
    num_slots: int | None = None
    num_blocks: int | None = None


@dataclass(frozen=True)
class LaneTables:
    """The lanes of all requests whose heads share slots. Made once, so CUDA graphs may hold the tensors.

    Attributes:
        owners: [L, N, KH], int16: the head that owns each lane of a heavy block; undefined for other blocks.
        pages: [L, N, KH], int32: the lists; a page is ``block_id * KH + lane``.
        offsets: [L, S, KH + 1], int32: start and end of each head's entries, by the request's slot.
        rows: [B, 3], int32: per row of the batch the request's slot, its number of pinned blocks, which come
            first in its block table, and of heavy blocks, which follow; -1, 0, 0 if its heads share nothing.
        keys: [L, N * KH], int32: the pages of this step's decodes, head by head, in the order of their keys.
            A block that is not pinned belongs to one request, so the pages always fit.
    """

    owners: Tensor
    pages: Tensor
    offsets: Tensor
    rows: Tensor
    keys: Tensor

    @classmethod
    def empty(
        cls,
        num_layers: int,
        num_blocks: int,
        num_heads: int,
        num_slots: int,
        max_rows: int,
        device: torch.device | str,
    ) -> LaneTables:
        """Tables without requests, for L ``layers``, N ``blocks``, KH ``heads``, S slots and B rows."""

        def zeros(*shape: int, of: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        rows = zeros(max_rows, 3)
        rows[:, 0] = -1
        return cls(
            owners=zeros(num_layers, num_blocks, num_heads, of=torch.int16),
            pages=zeros(num_layers, num_blocks, num_heads),
            offsets=zeros(num_layers, num_slots, num_heads + 1),
            rows=rows,
            keys=zeros(num_layers, num_blocks * num_heads),
        )

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        tables = (self.owners, self.pages, self.offsets, self.rows, self.keys)
        return sum(table.nbytes for table in tables)

    def of_layer(self, layer: int) -> LayerLanes:
        """The tables for kernels of one layer: whole, as parts would have another alignment per layer."""
        slots, blocks = self.offsets.shape[1], self.pages.shape[1]
        return LayerLanes(self.rows, self.offsets, self.pages, layer, slots, blocks)


class LayerBatch(NamedTuple):
    """One layer's cache and scores, and the batch that attends to it.

    The queries of a row are the last positions of its live sequence. There may be context before them
    (chunked prefill, prefix-cache hit). Rows with live length 0 are skipped.

    Attributes:
        query: [T, H, D]; may be strided along T.
        key_cache, value_cache: [N, BS, KH, D], any strides with a last one of 1. Their dtype is that of
            ``query``, or float8_e4m3fn (then ``query`` may have either; both are multiplied in 16 bits).
        scores: [N, KH, BS], float32, contiguous; receives probabilities summed over the q heads of a group.
        block_table: [B, MB], int32, without holes; may be strided along B.
        query_start_loc: [B + 1], int32. seq_lens: [B], int32, live lengths, the queries included; where
            heads share slots, their mean.
        scale: factor on q.k before the softmax.
        query_scale, key_scale, value_scale: factors of 8-bit tensors, one float32 on the device each;
            ``None``: 1. vLLM's ``layer._q_scale``, ``_k_scale``, ``_v_scale``.
        softcap: scaled logits x become ``softcap * tanh(x / softcap)`` (Gemma 2); 0: they do not change.
        sinks: [H], any float dtype: a learned logit per q head that belongs to no key (gpt-oss). Its
            exponential joins the softmax's denominator, so that probabilities sum to less than 1. Not capped.
        lanes: given if the heads of a row share slots. layer: index of these caches' layer in them.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scores: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float
    query_scale: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    lanes: LaneTables | None = None
    layer: int = 0

    @property
    def layer_lanes(self) -> LayerLanes:
        """:meth:`LaneTables.of_layer` of this layer; without lanes, all ``None``."""
        return LayerLanes() if self.lanes is None else self.lanes.of_layer(self.layer)

    @property
    def of_equal_heads(self) -> LayerBatch:
        """The same for rows whose heads share nothing."""
        return self if self.lanes is None else self._replace(lanes=None)
