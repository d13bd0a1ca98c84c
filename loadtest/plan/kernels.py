# SPDX-License-Identifier: Apache-2.0
"""Operations and bytes of attention, read off the GPU kernels line by line. Pure; one GPU.

Letters: B requests, S live tokens of a request, P prompt tokens, L layers, H q heads, KH kv heads,
G = H / KH, D head size, BS block size. Bytes are what must come from or go to memory if nothing stays in a
cache between kernels, and everything does within one; operations are those that mean something, not the
padding of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from loadtest.plan.shapes import ModelShape

__all__ = ["SPARE_PER_PROCESSOR", "Cost", "Kernels", "tile_of"]

WIDE = 2
"""Bytes of a query, an output, a weight: bf16."""

SPARE_PER_PROCESSOR = 4
MIN_PIECE = 128
"""Those of ``h2o_vllm.kernels.triton.workspace``; a test holds them together."""
SORTED_AT_ONCE = 4096
"""``_CHUNKS[1]`` of ``h2o_vllm.kernels.triton.compact``: of more candidates each bit is a pass, 32 in all."""


def tile_of(head_size: int) -> int:
    """Keys per step of the decode kernel's loop, as ``DecodeWorkspace`` chooses it for 16-bit queries."""
    padded = max(16, 1 << (head_size - 1).bit_length())
    return 32 if padded * WIDE > 128 else 64


@dataclass(frozen=True)
class Cost:
    """Operations, and bytes to and from memory."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """Of both."""
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Cost:
        """Of so many; a mean may be no whole number."""
        return Cost(self.flops * times, self.bytes * times)


@dataclass(frozen=True)
class Kernels:
    """The kernels on one GPU, for one model.

    Attributes:
        kv_bytes: of a number in the KV cache: 2, or 1 in fp8.
        processors: of the GPU.
    """

    shape: ModelShape
    block_size: int
    kv_bytes: int
    processors: int

    @cached_property
    def _kv(self) -> int:
        """Keys and values of a token in one layer and KV head."""
        return 2 * self.shape.head_size * self.kv_bytes

    def stock_decode(self, batch: int, live: float) -> Cost:
        """A step's attention without scores: every live key and value is read once, all layers."""
        shape = self.shape
        keys = batch * live
        kv = shape.kv_heads * self._kv * keys
        # Its own key and value are written first; queries in, outputs out; block ids.
        own = batch * (shape.kv_heads * self._kv + 2 * shape.heads * shape.head_size * WIDE)
        table = 4 * shape.kv_heads * keys / self.block_size
        return Cost(4 * shape.heads * shape.head_size * keys, kv + own + table) * shape.layers

    def scored_decode(self, batch: int, live: float) -> Cost:
        """The same with scores: ``decode.py`` and ``finish.py``."""
        return self.stock_decode(batch, live) + self.scoring(batch, live)

    def scoring(self, batch: int, live: float) -> Cost:
        """What scores cost a step on top of its attention.

        Per key and KV head: its score, float32, read and written; G probabilities in float16 and, per tile, G
        maxima in float32, written by the first kernel and read by whoever adds them up; its block id again.
        Per piece of a row that is cut: its output, maximum and sum in float32 written, and read by all
        pieces of the row. About four operations per key and q head: two powers, a product, a sum.
        """
        shape = self.shape
        keys = batch * live
        group = shape.heads // shape.kv_heads
        tile = tile_of(shape.head_size)
        per_key = 8 + 2 * 2 * group + 2 * 4 * group / tile + 4 / self.block_size
        pieces, parts = self.pieces(batch, live)
        partial = 8 * shape.heads * pieces
        if parts > 1:
            partial += 4 * shape.heads * pieces * (2 * shape.head_size + 2 * parts)
        scored = shape.kv_heads * per_key * keys + partial
        return Cost(4 * shape.heads * keys, scored) * shape.layers

    def pieces(self, batch: int, live: float) -> tuple[int, int]:
        """Pieces of all rows, if all are equally long, and of one row: ``plan.py``."""
        length, tile = max(1, round(live)), tile_of(self.shape.head_size)
        spare = max(4, SPARE_PER_PROCESSOR * self.processors // self.shape.kv_heads)
        target = max(MIN_PIECE, -(-batch * length // spare))
        target = -(-target // tile) * tile
        parts = -(-length // target)
        per_part = -(-length // parts)
        piece = max(tile, -(-per_part // tile) * tile)
        parts = -(-length // piece)
        return batch * parts, parts

    def eviction(self, candidates: float, moved: float) -> Cost:
        """``compact.py``, of one request: ``candidates`` are ranked, at most ``moved`` change their slot.

        Ranking reads each score. A move is listed and looked up (8 bytes each), its key, value and score are
        read and written.
        """
        shape = self.shape
        passes = 1 if candidates <= SORTED_AT_ONCE else 32
        per_head = 4 * candidates * passes + moved * (2 * 8 + 2 * self._kv + 8)
        return Cost(0.0, shape.layers * shape.kv_heads * per_head)

    def stock_prompt(self, tokens: int) -> Cost:
        """Attention of a whole prompt: each query with every key before it."""
        shape = self.shape
        pairs = tokens * (tokens + 1) / 2
        kv = 2 * shape.kv_heads * self._kv * tokens
        own = 2 * shape.heads * shape.head_size * WIDE * tokens
        return Cost(4 * shape.heads * shape.head_size * pairs, kv + own) * shape.layers

    def prompt_scores(self, tokens: int) -> Cost:
        """``prompt.py``: queries and keys are multiplied once more, now that each query's sum is known.

        Keys and queries are read again; each query's log-sum-exp is written by attention and read here; each
        key's score is set to zero, read and written. Every tile of keys reads the queries behind it: but for
        the first time from the L2 cache, see :meth:`prompt_rereads`.
        """
        shape = self.shape
        pairs = tokens * (tokens + 1) / 2
        read = (shape.kv_heads * self._kv / 2 + shape.heads * (shape.head_size * WIDE + 8)) * tokens
        scores = 12 * shape.kv_heads * tokens
        return Cost(2 * shape.heads * shape.head_size * pairs, read + scores) * shape.layers

    def prompt_rereads(self, tokens: int, key_tile: int = 128) -> float:
        """Bytes of queries that the L2 cache has to serve to :meth:`prompt_scores`."""
        tiles = -(-tokens // key_tile)
        seen = sum(tokens - tile * key_tile for tile in range(tiles)) - tokens
        return self.shape.layers * self.shape.heads * (self.shape.head_size * WIDE + 4) * seen
