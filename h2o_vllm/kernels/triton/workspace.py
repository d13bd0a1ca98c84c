# SPDX-License-Identifier: Apache-2.0
"""Memory and tile sizes of the decode kernels."""

from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from h2o_vllm.kernels.batch import LaneTables, LayerLanes
from h2o_vllm.kernels.triton.lanes import list_keys
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.kernels.triton.plan import FIELDS, HEAD_FIELDS, plan_pieces
from h2o_vllm.kernels.triton.tables import PINNED

SPAN = 256
"""Keys per step when scores are computed from the scratch: whole tiles. Each step waits for memory once."""

_ROWS = 128
_LISTED = 32
"""Blocks whose pages a program lists at a time."""
_MIN_PIECE = 128
"""Least keys per piece. That is 64 KiB of K and V at D = 128 in 16 bits, for 2 KiB of partial sums per 4 q
heads."""
_PROGRAMS_PER_PROCESSOR = 4
"""About as many run at a time. With eight, and tiles of twice the size, eight rows of 2,048 tokens took 1.4
times as long on an H200. Two and eight were not timed with these tiles."""


def _tile_of(head_size: int, dtype: torch.dtype) -> int:
    """Keys per tile: 8 KiB of keys at D = 64 and 128 in 16 bits.

    Then several programs share a processor, each with two tiles of keys and of values being loaded. Tiles of
    twice the size took 1.07 to 1.36 times as long at D = 128 on an H200.
    """
    wide = triton.next_power_of_2(head_size) * dtype.itemsize > 128
    return 32 if wide else 64


class DecodeWorkspace:
    """The plan and the scratch of :func:`.decode.attend_decode`; one per worker, shared by its layers.

    Addresses and sizes are fixed, so CUDA graphs may hold it. The layers of a model run one after the other.
    Two streams that decode at the same time would need two workspaces.

    Attributes:
        tile: keys per step of the kernel's loop. spare: pieces in addition to one per row.
        pieces: [max_batch + spare, 9], int32, the plan.
        head_pieces: [L, (max_batch + spare) * KH, 12], int32: each layer's plan of heads; ``None``: heads
            cannot share slots. With a plan of heads, scratch and partial results are numbered by its pieces.
        part_out: [max_batch + spare, H, D], part_max, part_sum: [max_batch + spare, H], float32: partial
            results of pieces.
        probs: [H, (tiles + slack) * tile]: exp(logit - maximum so far) of each key, float16 (float32 for a
            float32 cache, whose tests need that precision).
        tile_max: [KH, tiles + slack, G], float32: that maximum, in units of log2.
    """

    def __init__(
        self,
        max_batch: int,
        max_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        head_size: int,
        device: torch.device | str,
        spare: int | None = None,
        sharing_layers: int = 0,
    ) -> None:
        """Allocate the memory.

        Args:
            max_batch: the largest number of rows B of any batch, padding included.
            max_tokens: N * BS of the pool. Scored rows share only pinned blocks, so never more tokens after
                these are live. Rows that do not fit are attended, but their probabilities are dropped.
            num_heads: H of this rank. num_kv_heads: KH of this rank.
            dtype: of query and output. head_size: D.
            spare: pieces in addition to one per row; by default enough to fill this GPU.
            sharing_layers: number of layers with heads that may share slots.
        """
        device = torch.device(device)
        if spare is None:
            processors = 1
            if device.type == "cuda":
                processors = torch.cuda.get_device_properties(device).multi_processor_count
            spare = max(4, _PROGRAMS_PER_PROCESSOR * processors // num_kv_heads)
        self.tile = _tile_of(head_size, dtype)
        self.max_batch = max_batch
        self.spare = spare
        # The last tile of each row may be incomplete, and its first tile may begin among pinned tokens.
        self.max_tiles = max_tokens // self.tile + 2 * max_batch
        # The second launch reads whole spans without a mask, so it reads beyond the last row's tiles.
        tiles = self.max_tiles + SPAN // self.tile
        rows = max_batch + spare

        def empty(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=of, device=device)

        self.pieces = torch.full((rows, FIELDS), -1, dtype=torch.int32, device=device)
        self.head_pieces: Tensor | None = None
        if sharing_layers:
            shape = (sharing_layers, rows * num_kv_heads, HEAD_FIELDS)
            self.head_pieces = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.part_out = empty(rows, num_heads, head_size)
        self.part_max = empty(rows, num_heads)
        self.part_sum = empty(rows, num_heads)
        probs = torch.float32 if dtype == torch.float32 else torch.float16
        self.probs = empty(num_heads, tiles * self.tile, of=probs)
        self.tile_max = empty(num_kv_heads, tiles, num_heads // num_kv_heads)

    @property
    def nbytes(self) -> int:
        """Device memory in bytes, which the KV cache cannot use."""
        held = [self.pieces, self.part_out, self.part_max, self.part_sum, self.probs, self.tile_max]
        held += [] if self.head_pieces is None else [self.head_pieces]
        return sum(tensor.nbytes for tensor in held)

    def cuts(self, lengths: NDArray[np.int32]) -> bool:
        """Whether a plan of rows of these live lengths, [B], cuts any of them; computed on the host."""
        target = max(-(-int(lengths.sum()) // self.spare), _MIN_PIECE)
        target = -(-target // self.tile) * self.tile
        return bool(int(lengths.max(initial=0)) + target // 2 >= 2 * target)

    def plan(
        self,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        flags: Tensor,
        block_table: Tensor,
        block_size: int,
        lanes: LaneTables | None = None,
    ) -> None:
        """Cut this step's rows, or with ``lanes`` their heads, into pieces. Call it before the first layer.

        Eager, not in the graph; one launch, two with ``lanes``; no synchronisation. A graph captured with B
        rows serves plans of at most B rows.

        Args:
            query_start_loc: [B + 1], int32. seq_lens: [B], int32: live lengths of our rows; 0 for other rows
                and for padding. Rows with another number of queries than one are also skipped.
            flags: [B], int32. A flag divided by :data:`.PINNED` is the number of a row's first tokens without
                scores, which is rounded down to tiles. Rows may share the blocks of such tokens.
            block_table: [B, MB], int32, as attention gets it.
            lanes: the lanes of rows whose heads share slots; their keys are listed in it. Then
                :func:`.decode.attend_decode` must get it as well.

        Raises:
            ValueError: the workspace was made for fewer rows.
        """
        if seq_lens.shape[0] > self.max_batch:
            raise ValueError(
                f"at most {self.max_batch} rows can be planned, got {seq_lens.shape[0]}"
            )
        rows, layers, heads = seq_lens.shape[0], 1, 1
        pieces, told = self.pieces, LayerLanes()
        if lanes is not None:
            assert self.head_pieces is not None
            pieces, told = self.head_pieces[0], lanes.of_layer(0)
            layers, heads = len(self.head_pieces), self.tile_max.shape[0]
        grid = (max(1, -(-rows * heads // _ROWS)), layers)
        given: tuple[Any, ...] = (
            query_start_loc, seq_lens, flags, pieces, told.rows, told.offsets, told.num_slots, rows * heads,
            pieces.shape[0], self.spare * heads, self.max_tiles * heads,
        )  # fmt: skip
        constants = {
            "TILE": self.tile, "MIN_PIECE": _MIN_PIECE, "ROWS": _ROWS, "FIELDS": pieces.shape[1],
            "PINNED": PINNED, "KH": heads, "BS": block_size, "num_warps": 4,
        }  # fmt: skip
        form = (self.tile, heads, block_size, lanes is None)
        launch(plan_pieces, grid, form, given, constants)
        if lanes is not None:
            # The pieces that attention reads for B rows; later ones are unused.
            grid = ((rows + self.spare) * heads, layers)
            given = (
                block_table, pieces, told.rows, told.offsets, told.pages, lanes.keys, told.num_slots,
                told.num_blocks, pieces.shape[0], block_table.stride(0),
            )  # fmt: skip
            constants = {
                "KH": heads, "BS": block_size, "FIELDS": HEAD_FIELDS, "WIDTH": _LISTED, "num_warps": 1,
            }  # fmt: skip
            launch(list_keys, grid, (heads, block_size), given, constants)
