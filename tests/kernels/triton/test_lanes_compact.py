# SPDX-License-Identifier: Apache-2.0
"""Lanes are given out, taken over and filled exactly as by the rule in plain torch, bit for bit."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_vllm.kernels.triton import Compaction, LaneTables
from h2o_vllm.kernels.triton.share import unit_words
from tests.kernels.triton.cases import DTYPES
from tests.kernels.triton.evict_laws import SPECIAL, make_layers
from tests.kernels.triton.lane_evict_laws import (
    check_lane_compaction,
    check_lanes_go_back_and_forth,
    uneven,
)

FIRST = Compaction([7, 2, 9], [1, 11, 4, 3, 5], [7, 2, 9, 1, 11, 4, 3, 5], 3)
LATER = Compaction([6, 10], [8], [8], 1)
"""Heavy and doomed blocks; which of them are fresh; the request's slot."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "size", "block_size", "layout"),
    [(2, 16, 12, "NHD"), (3, 24, 4, "HND"), (5, 16, 8, "NHD")],
)
def test_compaction_equals_the_rule(
    kv_heads: int, size: int, block_size: int, layout: str, dtype: str
) -> None:
    caches, scores = make_layers(DTYPES[dtype], size, block_size, layout, 2, kv_heads=kv_heads)
    tables = check_lane_compaction(caches, uneven(scores), [FIRST, LATER])
    # If no head had more than another, nothing would have been shared.
    assert (tables.offsets[:, FIRST.slot].diff() != len(FIRST.heavy)).any()


def test_more_heads_than_7_bits_number_are_told_apart() -> None:
    """As where each of many query heads has KV of its own."""
    tables = LaneTables.empty(1, 1, 200, 1, 1, "meta")
    assert torch.iinfo(tables.owners.dtype).max >= tables.owners.shape[2] - 1


def test_an_8_bit_cache_is_compacted() -> None:
    check_lane_compaction(*make_layers(torch.float8_e4m3fn, 16, 8, layers=2), [FIRST, LATER])


@pytest.mark.parametrize("seed", [3, 2, 1, 0])  # most values first: reduced grids have that
def test_ties_and_special_values_rank_as_in_the_rule(seed: int) -> None:
    caches, scores = make_layers(torch.bfloat16, 16, 4, layers=2, kv_heads=3)
    gen = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, 2 + 2 * seed, scores.shape, generator=gen)
    check_lane_compaction(caches, SPECIAL[picks], [FIRST, LATER], seed=seed)


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
    check_lane_compaction(caches, SPECIAL[picks], [one], seed=seed)


def test_many_candidates_are_looked_at_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["h2o_vllm.kernels.triton.compact"], "_SHARED_CHUNK", 16)
    caches, scores = make_layers(torch.bfloat16, 16, 4, layers=2, kv_heads=3)
    check_lane_compaction(caches, (uneven(scores) * 6).round(), [FIRST, LATER])


def test_a_small_scratch_takes_more_launches() -> None:
    caches, scores = make_layers(torch.bfloat16, 16, 4, layers=2, kv_heads=3)
    one_layer = 4 * unit_words(8, 3, 3, 4)
    check_lane_compaction(
        caches, uneven(scores), [FIRST, LATER], scratch_bytes=-(-one_layer // 8) * 8
    )
    with pytest.raises(ValueError, match="do not fit"):
        check_lane_compaction(caches, scores, [FIRST, LATER], scratch_bytes=one_layer - 8)
