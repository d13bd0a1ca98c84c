# SPDX-License-Identifier: Apache-2.0
"""Compaction keeps exactly the tokens that the rule in plain torch keeps, in the same slots, bit for bit.

Of heads that share slots, lanes are also given out, taken over and filled as by the rule.
"""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_vllm.kernels.triton import Compaction, LaneTables
from h2o_vllm.kernels.triton.evictions import Evictions, by_size
from h2o_vllm.kernels.triton.share import unit_words
from tests.kernels.triton.cases import DTYPES
from tests.kernels.triton.evict_laws import (
    SPECIAL,
    check_compaction,
    check_lanes_go_back_and_forth,
    make_layers,
    uneven,
)

FIRST = Compaction([7, 2, 9], [1, 11, 4, 3, 5], [7, 2, 9, 1, 11, 4, 3, 5], 3)
LATER = Compaction([6, 10], [8], [8], 1)
"""Heavy and doomed blocks; which of them are fresh; the request's slot."""
BOTH = [FIRST, LATER]
HEADS = pytest.mark.parametrize("seed", [None, 0], ids=["equal", "shared"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "block_size", "layout"),
    [(64, 528, "NHD"), (80, 16, "HND"), (96, 48, "NHD"), (128, 128, "HND"), (256, 16, "NHD")],
)
def test_compaction_equals_the_rule(dtype: str, size: int, block_size: int, layout: str) -> None:
    check_compaction(*make_layers(DTYPES[dtype], size, block_size, layout), BOTH)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "size", "block_size", "layout"),
    [(2, 16, 12, "NHD"), (3, 24, 4, "HND"), (5, 16, 8, "NHD")],
)
def test_compaction_of_shared_heads_equals_the_rule(
    kv_heads: int, size: int, block_size: int, layout: str, dtype: str
) -> None:
    caches, scores = make_layers(DTYPES[dtype], size, block_size, layout, 2, kv_heads=kv_heads)
    tables = check_compaction(caches, uneven(scores), BOTH, seed=0)
    # If no head had more than another, nothing would have been shared.
    assert (tables.offsets[:, FIRST.slot].diff() != len(FIRST.heavy)).any()


def test_more_heads_than_7_bits_number_are_told_apart() -> None:
    """As where each of many query heads has KV of its own."""
    tables = LaneTables.empty(1, 1, 200, 1, 1, "meta")
    assert torch.iinfo(tables.owners.dtype).max >= tables.owners.shape[2] - 1


@HEADS
def test_an_8_bit_cache_is_compacted(seed: int | None) -> None:
    check_compaction(*make_layers(torch.float8_e4m3fn, 80, 16, layers=2), BOTH, seed=seed)


@pytest.mark.parametrize(
    "pairs", [[], [([], [1, 2])], [([3], [])], [([], [1]), ([4], [5]), ([6], [])]]
)
def test_evictions_of_nothing_do_nothing(pairs: list[tuple[list[int], list[int]]]) -> None:
    check_compaction(*make_layers(), [Compaction(*pair) for pair in pairs])


@HEADS
@pytest.mark.parametrize("values", [8, 6, 4, 2])  # most first: reduced grids have that
def test_ties_and_special_values_rank_as_in_the_rule(values: int, seed: int | None) -> None:
    """Many ties, infinities, NaN, both zeros, denormals, negative numbers."""
    block_size = 16 if seed is None else 4
    caches, scores = make_layers(torch.bfloat16, 16, block_size, layers=2, kv_heads=3)
    gen = torch.Generator().manual_seed(values)
    picks = torch.randint(0, values, scores.shape, generator=gen)
    check_compaction(caches, SPECIAL[picks], BOTH, seed=seed)


@HEADS
def test_many_candidates_are_ranked_in_chunks(
    monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    module = sys.modules["h2o_vllm.kernels.triton.compact"]
    monkeypatch.setattr(module, "CHUNKS", (16, 64))
    monkeypatch.setattr(module, "_SHARED_CHUNK", 16)
    caches, scores = make_layers(
        torch.bfloat16, 16, 16 if seed is None else 4, layers=2, kv_heads=3
    )
    # Ties across chunks.
    check_compaction(caches, (uneven(scores) * 6).round(), BOTH, seed=seed)


@HEADS
def test_a_small_scratch_takes_more_launches(seed: int | None) -> None:
    caches, scores = make_layers(torch.bfloat16, 16, 4, layers=2, kv_heads=3)
    # Of equal heads: a number of moves per head, aligned; source and target for the larger room in slots.
    words = 4 + 3 * 2 * 3 * 4 if seed is None else unit_words(8, 3, 3, 4)
    one_layer = -(-4 * words // 8) * 8
    check_compaction(caches, uneven(scores), BOTH, one_layer, seed=seed)
    with pytest.raises(ValueError, match="do not fit"):
        check_compaction(caches, scores, BOTH, one_layer - 8, seed=seed)


def test_lanes_go_back_and_forth() -> None:
    """Evictions of one request, whose heads' needs change; ranked blocks go, fresh ones come."""
    caches, scores = make_layers(torch.float32, 16, 4, layers=2, kv_heads=3, blocks=13)
    assert check_lanes_go_back_and_forth(caches, scores, 4, [2] * 4) > 5


@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_compaction_equals_the_rule_on_any_scores(data: st.DataObject) -> None:
    """Many ties, infinities, NaN and both zeros; any split of the blocks; lanes of anybody's."""
    heads = data.draw(st.integers(1, 4))
    caches, scores = make_layers(torch.float32, 16, 4, layers=2, kv_heads=heads, blocks=9)
    order = data.draw(st.permutations(range(1, 9)))
    total = data.draw(st.integers(2, 8))
    heavy = data.draw(st.integers(1, total - 1))
    fresh = data.draw(st.integers(0, total))
    seed = data.draw(st.integers(0, 99))
    picks = torch.randint(
        0, data.draw(st.integers(1, 9)), scores.shape, generator=torch.Generator().manual_seed(seed)
    )
    one = Compaction(order[:heavy], order[heavy:total], order[total - fresh : total], 0)
    check_compaction(caches, SPECIAL[picks], [one], seed=seed)


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
