# SPDX-License-Identifier: Apache-2.0
"""Compaction keeps exactly the tokens the reference keeps, in the same slots, bit for bit."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from h2o_vllm.kernels.triton.evictions import Compaction, Evictions, by_size
from tests.kernels.triton.cases import DTYPES
from tests.kernels.triton.evict_laws import SPECIAL, check_compact, make_layers

PAIRS = [([7, 2, 9], [1, 11, 4, 3, 5]), ([6], [8])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "block_size", "layout"),
    [(64, 528, "NHD"), (80, 16, "HND"), (96, 48, "NHD"), (128, 128, "HND"), (256, 16, "NHD")],
)
def test_compaction_equals_the_reference(
    dtype: str, size: int, block_size: int, layout: str
) -> None:
    caches, scores = make_layers(DTYPES[dtype], size, block_size, layout)
    check_compact(caches, scores, PAIRS)


def test_an_8_bit_cache_is_compacted() -> None:
    check_compact(*make_layers(torch.float8_e4m3fn, 80, 16), PAIRS)


@pytest.mark.parametrize(
    "pairs", [[], [([], [1, 2])], [([3], [])], [([], [1]), ([4], [5]), ([6], [])]]
)
def test_evictions_of_nothing_do_nothing(pairs: list[tuple[list[int], list[int]]]) -> None:
    check_compact(*make_layers(), pairs)


@pytest.mark.parametrize("seed", [3, 2, 1, 0])  # most values first: reduced grids have that
def test_ties_and_special_values_rank_as_in_the_reference(seed: int) -> None:
    """Many ties, infinities, NaN, both zeros, denormals, negative numbers."""
    caches, scores = make_layers(torch.bfloat16, 16, 16)
    gen = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, 2 + 2 * seed, scores.shape, generator=gen)
    check_compact(caches, SPECIAL[picks], PAIRS)


def test_many_candidates_are_ranked_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["h2o_vllm.kernels.triton.compact"], "CHUNKS", (16, 64))
    caches, scores = make_layers(torch.bfloat16, 16, 16)
    scores = (scores * 20).round()  # ties across chunks
    check_compact(caches, scores, PAIRS)


def test_a_small_scratch_takes_more_launches() -> None:
    caches, scores = make_layers(torch.bfloat16, 16, 16)
    # Bytes: heads, the larger room in slots, source and target; and a number of moves per head.
    one_layer = 2 * 3 * 16 * 8 + 2 * 4
    check_compact(caches, scores, PAIRS, scratch_bytes=one_layer)
    with pytest.raises(ValueError, match="do not fit"):
        check_compact(caches, scores, PAIRS, scratch_bytes=one_layer - 8)


def test_evictions_are_packed_without_gaps() -> None:
    given = [Compaction([5, 6], [7]), Compaction([], [1]), Compaction([8], (2, 3, 4), {8, 3}, 9)]
    packed = Evictions.pack(given, "cpu")
    assert packed.counts.tolist() == [[2, 1, -1], [1, 3, 9]]
    assert packed.blocks.tolist() == [[5, 6, 7, 0], [-9, 2, -4, 4]]
    assert (packed.max_heavy, packed.max_doomed) == (2, 3)
    assert Evictions.pack(given[1:2], "cpu").blocks.shape == (0, 0)


def test_evictions_reach_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy waits for the device otherwise. Here the "device" is the host."""
    pinned: list[Tensor] = []

    def pin(here: Tensor) -> Tensor:
        pinned.append(here)
        return here

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", lambda here, *_, **__: here)
    packed = Evictions.pack([Compaction((3, 4), (1, 2))], "cuda")
    assert len(pinned) == 1
    assert packed.blocks.tolist() == [[3, 4, 1, 2]]


def test_a_long_eviction_sizes_no_others() -> None:
    sizes = (2, 64, 65, 256, 257, 1024, 1025, 8192)
    given = [Compaction([0], range(1, size)) for size in sizes]
    classes = by_size(given, 16)
    assert [[1 + len(one.doomed) for one in some] for some in classes] == [
        [2, 64], [65, 256], [257, 1024], [1025], [8192],
    ]  # fmt: skip
    assert by_size([], 16) == []
