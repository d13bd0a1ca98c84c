# SPDX-License-Identifier: Apache-2.0
"""What an eviction asks on a CPU beside attention: every layer's compaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu import reference
from loadtest.common.results import Row
from loadtest.kernels.shapes import BLOCK_SIZE, SHAPES
from loadtest.kernels.timing import ratio_row, ratio_text, rounds


@dataclass(frozen=True)
class EvictionCase:
    """One eviction: ``doomed`` blocks of ``blocks`` go, the others are heavy."""

    shape: str
    blocks: int
    doomed: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def moved_bytes(self) -> int:
        """The least that it has to read and write: scores once, and what moves.

        With random scores the share of the doomed tokens that survives is that of the room.
        """
        layers, _, heads, size = SHAPES[self.shape]
        tokens = layers * heads * self.blocks * BLOCK_SIZE
        vector = size * self.dtype.itemsize
        moves = tokens * self.doomed * (self.blocks - self.doomed) // self.blocks**2
        return 4 * tokens + moves * (4 * vector + 8)

    def build(self) -> Callable[[Any], Callable[[], torch.Tensor]]:
        """Makes its tensors; what to time, by implementation."""
        layers, _, heads, size = SHAPES[self.shape]
        gen = torch.Generator().manual_seed(0)
        shape = (layers, self.blocks + 1, heads, BLOCK_SIZE)
        kv = torch.randn(*shape, 2 * size, generator=gen).to(self.dtype)
        caches, scores = list(kv), torch.rand(shape, generator=gen)
        blocks = (torch.randperm(self.blocks, generator=gen) + 1).int()
        doomed, heavy = blocks.split((self.doomed, self.blocks - self.doomed))
        fresh = scores.clone()

        def compact(impl: Any) -> torch.Tensor:
            scores.copy_(fresh)  # a second run over the same scores would have nothing to move
            impl.compact(caches, scores, heavy, doomed)
            return scores

        return lambda impl: lambda: compact(impl)

    def wrong(self, impls: Mapping[str, Any]) -> str | None:
        """Which of ``impls`` does not reproduce the reference."""
        call = self.build()
        want = call(reference)().clone()
        others = (
            name for name, impl in impls.items()
            if not torch.allclose(call(impl)(), want, rtol=1e-3, atol=1e-4)
        )  # fmt: skip
        return next(others, None)

    def measure(self, impls: Mapping[str, Any], seconds: float) -> Row:
        """``impls`` beside the reference, of which ratios are multiples: vLLM's kernels evict nothing."""
        call = self.build()
        contestants = {"reference": kernels.load("reference")} | dict(impls)
        times = rounds({name: call(impl) for name, impl in contestants.items()}, seconds)
        return {
            "kind": "eviction", "shape": self.shape, "requests": 1,
            "length": self.blocks * BLOCK_SIZE, "doomed_blocks": self.doomed,
            "block_size": BLOCK_SIZE, "dtype": str(self.dtype).removeprefix("torch."),
            "rounds": len(times["reference"]), "moved_bytes": self.moved_bytes,
            **{name: ratio_row(taken, times["reference"]) for name, taken in times.items()},
        }  # fmt: skip


def eviction_line(row: Row, impls: Mapping[str, Any]) -> str:
    """What it was, floor and reference in us, then ours as multiples of it."""
    what = f"{'compact':<15} {row['shape']:<12} "
    cells = [f"{row['floor_us']:>9.0f}", f"{row['reference']['median_us']:>9.0f}"]
    cells += [ratio_text(name, row[name]) for name in impls if name != "reference"]
    return "  ".join([f"{what}{row['doomed_blocks'] * BLOCK_SIZE:>4} of {row['length']}", *cells])


def _cases() -> Iterator[EvictionCase]:
    for shape in SHAPES:
        # A prompt's first at 0.2, and one while it generates.
        for blocks, doomed in ((32, 25), (8, 1)):
            yield EvictionCase(shape, blocks, doomed)


EVICTIONS = tuple(_cases())
