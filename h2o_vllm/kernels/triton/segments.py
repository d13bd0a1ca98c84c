# SPDX-License-Identifier: Apache-2.0
"""How the scores of prompts are divided among programs: each row's queries in segments, cut by position.

A prompt of 2,048 tokens has 16 tiles of keys; with two kv heads that is work for 32 programs, on a GPU that
holds 264 or more. So the queries are divided as well. The first segment of a row adds to the scores; what the
others have summed is added by a second launch, in their order, without atomics:

    ((score + first segment) + second segment) + ...

These are the sums that the segments would give one after the other, each in a call of its own. Where a row is
cut depends on the logical positions of its queries alone: not on the batch, not on the GPU, not on where its
chunks begin and end. A chunk that ends at a cut changes no bit; one that ends elsewhere, or a prefix that is
read from the cache, regroups float32 sums, as it did when rows were whole.

Segments are 256 queries long, and from position 4,096 on between a 32nd and a 16th of what lies before them:
the longer a prompt, the fewer of them does it need to fill a GPU, and the partial sums of a chunk take about
128 bytes per query and kv head. A row whose partial sums would not fit the scratch has its segments doubled
until they do, alone in the batch or not; rows that do not fit together are launched one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["SCRATCH_BYTES", "PromptSegments", "cuts"]

SHORTEST = 256
"""Queries of a segment. A program then loads its keys once for 256 * G rows of products."""
SCRATCH_BYTES = 32 << 20
"""The most that the partial sums of one launch take."""
FIELDS = 8
"""Words of one segment: row, its first query and the end of its queries in the batch, offset of its partial
sums in the scratch or -1 for a row's first, keys that they have room for, how many segments
follow a first and are summed, two unused. With eight a launch's first segment is aligned like any other:
Triton compiles for alignment."""
_ROOM = 128
"""Partial sums are written in whole tiles of keys; a multiple of the largest."""


def cuts(first: int, end: int, shortest: int = SHORTEST) -> list[int]:
    """Where the segments of the queries at positions ``first`` .. ``end - 1`` begin, and ``end``.

    Beside ``first`` and ``end`` the same for any part of a sequence.
    """
    found, at = [first], first
    while True:
        # 16 until position 16 * shortest, and 16 more with each doubling.
        length = shortest << max(0, (at // shortest).bit_length() - 5)
        at = (at // length + 1) * length
        if at >= end:
            return [*found, end]
        found.append(at)


@dataclass(frozen=True)
class _Row:
    """A row's segments, and for how many keys each but the first leaves a partial sum of one kv head."""

    segments: list[tuple[int, int]]
    keys: int

    @property
    def sums(self) -> int:
        return (len(self.segments) - 1) * self.keys

    @classmethod
    def cut(cls, start: int, end: int, length: int, live: int, most: int) -> _Row:
        # Positions less this are tokens of the batch.
        ahead, shortest = length - end, SHORTEST
        keys = -(-live // _ROOM) * _ROOM
        while True:
            row = cls(list(pairwise(cuts(start + ahead, length, shortest))), keys)
            if row.sums <= most:
                return cls([(a - ahead, b - ahead) for a, b in row.segments], keys)
            shortest *= 2


@dataclass(frozen=True)
class PromptSegments:
    """The scored queries of a step's prompts. Made once per step, used by each of its layers.

    Attributes:
        segments: [I, 8], int32, on the device; what the words are, says ``FIELDS``.
        launches: segments of each launch, from .. to, and how many partial sums per kv head they leave.
        max_keys: no row has more.
        partial: float32, the partial sums of one launch; ``None`` if all rows are whole.
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
        """Divide the rows' queries; one asynchronous copy.

        Args:
            rows: which rows of the batch, each once.
            starts, ends: where in the batch their scored queries begin and end; the last one of each is
                the last of its row.
            lengths: their logical lengths, these queries included: where they are cut.
            live: no row's live length is larger; host numbers, they size grid and scratch.
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
