# SPDX-License-Identifier: Apache-2.0
"""How the scores of prompts are divided among programs: each row's queries in segments, cut by position.

A prompt of 2,048 tokens has 16 tiles of keys. With two KV heads that is work for 32 programs, on a GPU that
runs 264 or more at a time. So the queries are divided as well. The first segment of a row adds to the scores.
A second launch adds the sums of the other segments, in order, without atomics:

    ((score + first segment) + second segment) + ...

The result is the same as if each segment had a call of its own. The cuts of a row depend on the logical
positions of its queries alone: not on the batch, the GPU, or the chunks. A chunk that ends at a cut changes
no bit. A chunk that ends elsewhere, or a prefix from the cache, groups the float32 sums in another way.

A segment has 256 queries, and from position 4,096 on between a 32nd and a 16th of the number of tokens before
it: a longer prompt needs fewer segments to fill a GPU, and the partial sums of a chunk take about 128 bytes
per query and KV head. If the partial sums of a row do not fit the scratch, its segments are doubled until
they do, whatever else is in the batch. Rows that do not fit together are launched one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

SHORTEST = 256
"""Least queries per segment. A program then loads its keys once for 256 * G rows of products."""
SCRATCH_BYTES = 32 << 20
"""The most bytes that the partial sums of one launch take."""
FIELDS = 8
"""Words of one segment: row, first query and end of its queries in the batch, offset of its partial sums in
the scratch (-1 for a row's first segment), number of keys that these have room for, number of segments that
follow a first one, two unused. With eight words all segments have the same alignment, for which Triton
compiles."""
_ROOM = 128
"""Partial sums are written in whole tiles of keys: a multiple of the largest tile."""


def cuts(first: int, end: int, shortest: int = SHORTEST) -> list[int]:
    """Starts of the segments of the queries at positions ``first`` .. ``end - 1``, then ``end``.

    Except for ``first`` and ``end``, the cuts are the same for any part of a sequence.
    """
    found, at = [first], first
    while True:
        # 16 segments until position 16 * shortest, and 16 more with each doubling.
        length = shortest << max(0, (at // shortest).bit_length() - 5)
        at = (at // length + 1) * length
        if at >= end:
            return [*found, end]
        found.append(at)


@dataclass(frozen=True)
class _Row:
    """A row's segments, and the number of keys for which each but the first has partial sums, per KV head."""

    segments: list[tuple[int, int]]
    keys: int

    @property
    def sums(self) -> int:
        return (len(self.segments) - 1) * self.keys

    @classmethod
    def cut(cls, start: int, end: int, length: int, live: int, most: int) -> _Row:
        # A position minus this is a token's index in the batch.
        ahead, shortest = length - end, SHORTEST
        keys = -(-live // _ROOM) * _ROOM
        while True:
            row = cls(list(pairwise(cuts(start + ahead, length, shortest))), keys)
            if row.sums <= most:
                return cls([(a - ahead, b - ahead) for a, b in row.segments], keys)
            shortest *= 2


@dataclass(frozen=True)
class PromptSegments:
    """The scored queries of a step's prompts. Made once per step, used by all layers.

    Attributes:
        segments: [I, 8], int32, on the device; see ``FIELDS`` for the words.
        launches: per launch its first segment, the end, and its number of partial sums per KV head.
        max_keys: the most keys of any row.
        partial: float32, the partial sums of one launch; ``None`` if each row is one segment.
    """

    segments: Tensor
    launches: tuple[tuple[int, int, int], ...]
    max_keys: int
    partial: Tensor | None

    @classmethod
    def cut(
        cls,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        lengths: Sequence[int],
        live: Sequence[int],
        kv_heads: int,
        device: torch.device | str,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> PromptSegments:
        """Divide the rows' queries into segments, and copy these to the device in one asynchronous copy.

        Args:
            rows: rows of the batch, each once.
            starts, ends: the range of their scored queries in the batch, up to the last query of the row.
            lengths: logical lengths, these queries included. They decide the cuts.
            live: upper bounds of the rows' live lengths; host numbers, they size grid and scratch.
            kv_heads: KH of this rank.
            scratch_bytes: see :data:`SCRATCH_BYTES`.
        """
        most = scratch_bytes // (4 * kv_heads)
        words: list[list[int]] = []
        launches: list[tuple[int, int, int]] = []
        begun = used = 0
        for number, start, end, length, keys in zip(rows, starts, ends, lengths, live, strict=True):
            row = _Row.cut(start, end, length, keys, most)
            if used + row.sums > most:
                launches.append((begun, len(words), used))
                begun, used = len(words), 0
            for at, (first, last) in enumerate(row.segments):
                offset = -1 if not at else (used + (at - 1) * row.keys) * kv_heads
                follow = 0 if at else len(row.segments) - 1
                words.append([number, first, last, offset, row.keys, follow, 0, 0])
            used += row.sums
        launches.append((begun, len(words), used))
        on_gpu = torch.device(device).type == "cuda"
        packed = torch.tensor(words, dtype=torch.int32, pin_memory=on_gpu)
        packed = packed.view(len(words), FIELDS)
        largest = max(sums for _, _, sums in launches) * kv_heads
        return cls(
            segments=packed.to(device, non_blocking=True),
            launches=tuple(launch for launch in launches if launch[1] > launch[0]),
            max_keys=max(live, default=0),
            partial=torch.empty(largest, device=device) if largest else None,
        )
