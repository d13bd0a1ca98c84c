# SPDX-License-Identifier: Apache-2.0
"""What a first eviction has to do, counted beside its prompt: operations and bytes of an 8B model. Pure.

Of what our GPU kernels do, not of what would be the least: keys and values are read as often as the kernels
read them, a sort compares as often as theirs. Seconds are those of an H100's datasheet, of which a share is
reached: the larger one of operations and bytes of each part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.kernels.compaction import HEAD_SIZE, KV_HEADS, LAYERS

__all__ = ["Work", "first_eviction", "prompt", "share"]

HEADS, PARAMETERS = 32, 6_979_321_856
"""Query heads of a layer; weights that each token of a prompt is multiplied by."""
TENSOR_CORES, VECTORS, BANDWIDTH = 989e12, 67e12, 3.35e12
"""Dense bf16 and float32 operations, and bytes, per second: NVIDIA H100 datasheet, SXM5 80 GB."""
COMPUTE, MEMORY = 0.6, 0.75
"""The shares of them that are assumed to be reached."""
TILE, BITS, PROBE = 1024, 32, 8
"""Tokens of a tile of the sort, passes that look for the lowest survivor, and operations of a probe or of a
comparison, loads and places with it."""


@dataclass(frozen=True)
class Work:
    """A part: what it is, operations, bytes, and whether tensor cores do it."""

    part: str
    operations: float
    moved: float
    on_tensor_cores: bool = False

    @property
    def seconds(self) -> float:
        """By the datasheet."""
        rate = TENSOR_CORES if self.on_tensor_cores else VECTORS
        return max(self.operations / (rate * COMPUTE), self.moved / (BANDWIDTH * MEMORY))


def prompt(tokens: int) -> Work:
    """What a prompt's own computation takes."""
    operations = 2.0 * PARAMETERS * tokens + 2.0 * LAYERS * HEADS * HEAD_SIZE * tokens**2
    return Work("prompt", operations, 2.0 * PARAMETERS, on_tensor_cores=True)


def first_eviction(tokens: int, ranks: str, kept: float) -> Iterator[Work]:
    """The parts of an eviction that ranks all ``tokens`` for the first time, of equal heads in bf16.

    Args:
        ranks: joined by ``+``. kept: share of the tokens that stays.
    """
    names = ranks.split("+")
    candidates, vector = float(LAYERS * KV_HEADS * tokens), 2.0 * HEAD_SIZE
    for name in names:
        if name == "predicted":
            # Each number for every head, as of up to 2,048 features; pairs' second numbers as well.
            numbers = 2 * HEAD_SIZE * KV_HEADS
            yield Work(name, 2.0 * candidates * numbers, candidates * (2 * vector + 2 * 4))
        elif name in ("key", "value"):
            # Added up, then looked at.
            yield Work(name, 6.0 * candidates * HEAD_SIZE, candidates * (2 * vector + 4))
        elif name == "end":
            # Neighbours' scores and their early parts, from L1 but once.
            yield Work(name, 7 * PROBE * candidates, candidates * 3 * 4)
    if len(names) > 1:
        inside = math.log2(TILE) * (math.log2(TILE) + 1) / 4
        probes = (math.ceil(tokens / TILE) - 1) * (math.log2(TILE) + 1)
        each = candidates * len(names)
        yield Work("places", each * PROBE * (inside + probes), each * 4 * 5 + candidates * 4 * 2)
    moved = 2 * min(kept, 1 - kept) * 2 * vector
    yield Work("moves", candidates * BITS * 2, candidates * (4 * (BITS + 3) + moved))


def share(tokens: int, ranks: str, kept: float = 0.1) -> float:
    """Of a prompt's seconds, what its first eviction takes."""
    parts = first_eviction(tokens, ranks, kept)
    return sum(part.seconds for part in parts) / prompt(tokens).seconds
