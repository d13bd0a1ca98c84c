# SPDX-License-Identifier: Apache-2.0
"""Lanes are given out, taken over and filled exactly as by the rule in plain torch, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_vllm.kernels.lanes import compact_shared as rule
from h2o_vllm.kernels.lanes import own_lanes, share_lanes
from h2o_vllm.kernels.triton.compact_shared import compact_shared
from h2o_vllm.kernels.triton.evictions import KVLayers, SharedEviction, SharedEvictions
from h2o_vllm.kernels.triton.lanes import LaneTables
from h2o_vllm.kernels.triton.share import unit_words
from tests.kernels.triton.cases import DTYPES, bits, halves
from tests.kernels.triton.evict_laws import SPECIAL, make_layers
from tests.kernels.triton.lane_cases import pages_of, random_owners

SLOTS = 5
FIRST = SharedEviction([7, 2, 9], [1, 11, 4, 3, 5], [7, 2, 9, 1, 11, 4, 3, 5], 3)
LATER = SharedEviction([6, 10], [8], [8], 1)
"""Heavy and doomed blocks; which of them are fresh; the request's slot."""


def uneven(scores: Tensor) -> Tensor:
    """Some heads need more than others, in each layer other ones."""
    layers, _, heads, _ = scores.shape
    factors = torch.linspace(0.3, 3.0, heads)
    return scores * torch.stack([factors.roll(layer) for layer in range(layers)])[:, None, :, None]


def tables_for(
    scores: Tensor, evictions: Sequence[SharedEviction], seed: int = 0
) -> tuple[LaneTables, list[Tensor]]:
    """Tables in which ranked blocks have any owners; and the owners of each eviction's blocks, [L, n, KH]."""
    layers, blocks, heads, _ = scores.shape
    tables = LaneTables.empty(layers, blocks, heads, SLOTS, SLOTS, "cpu")
    tables.owners.fill_(-100)
    gen, found = torch.Generator().manual_seed(seed), []
    for one in evictions:
        order = [*one.heavy, *one.doomed]
        owners = own_lanes(layers, len(order), heads).clone()
        known = [at for at, block in enumerate(order) if block not in set(one.fresh)]
        if known:
            owners[:, known] = random_owners(layers, len(known), heads, gen).int()
            tables.owners[:, [order[at] for at in known]] = owners[:, known].to(torch.int8)
        found.append(owners)
    return tables, found


def check_shared(
    caches: list[Tensor],
    scores: Tensor,
    evictions: Sequence[SharedEviction],
    scratch_bytes: int = 1 << 20,
    seed: int = 0,
) -> LaneTables:
    """Caches, scores, owners and lists equal the rule's; blocks that are not heavy stay as they were."""
    tables, before = tables_for(scores, evictions, seed)
    old_pages, old_offsets, old_owners = (
        table.clone() for table in (tables.pages, tables.offsets, tables.owners)
    )
    got, want = ([cache.clone() for cache in caches] for _ in range(2))
    got_scores, want_scores = scores.clone(), scores.clone()
    layers = KVLayers(*zip(*(halves(cache) for cache in got), strict=True), scratch_bytes)
    layers.moves.fill_(-(2**30))
    compact_shared(layers, got_scores, tables, SharedEvictions.pack(evictions, "cpu"))
    heavy: set[int] = set()
    for one, owners in zip(evictions, before, strict=True):
        views = zip(*(halves(cache) for cache in want), strict=True)
        now = rule(*views, want_scores, one.heavy, one.doomed, owners)
        assert torch.equal(tables.owners[:, list(one.heavy)].int(), now)
        for layer in range(len(now)):
            listed = tables.pages[layer, list(one.heavy)].flatten().tolist()
            ends = tables.offsets[layer, one.slot].tolist()
            for head in range(now.shape[2]):
                mine = pages_of(one.heavy, now[layer], head)
                assert sorted(listed[ends[head] : ends[head + 1]]) == sorted(mine)
        heavy.update(one.heavy)
    assert torch.equal(bits(got_scores), bits(want_scores))
    untouched = [block for block in range(scores.shape[1]) if block not in heavy]
    assert torch.equal(bits(got_scores[:, untouched]), bits(scores[:, untouched]))
    assert torch.equal(tables.pages[:, untouched], old_pages[:, untouched])
    assert torch.equal(tables.owners[:, untouched], old_owners[:, untouched])
    others = [slot for slot in range(SLOTS) if slot not in {one.slot for one in evictions}]
    assert torch.equal(tables.offsets[:, others], old_offsets[:, others])
    for a, b, original in zip(got, want, caches, strict=True):
        assert torch.equal(bits(a), bits(b))
        assert torch.equal(bits(a[untouched]), bits(original[untouched]))
    return tables


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "size", "block_size", "layout"),
    [(2, 16, 16, "NHD"), (3, 24, 4, "HND"), (5, 16, 8, "NHD")],
)
def test_compaction_equals_the_rule(
    kv_heads: int, size: int, block_size: int, layout: str, dtype: str
) -> None:
    caches, scores = make_layers(DTYPES[dtype], size, block_size, layout, 2, kv_heads=kv_heads)
    tables = check_shared(caches, uneven(scores), [FIRST, LATER])
    # If no head had more than another, nothing would have been shared.
    assert (tables.offsets[:, FIRST.slot].diff() != len(FIRST.heavy)).any()


def test_an_8_bit_cache_is_compacted() -> None:
    check_shared(*make_layers(torch.float8_e4m3fn, 16, 8, layers=2), [FIRST, LATER])


@pytest.mark.parametrize("seed", [3, 2, 1, 0])  # most values first: reduced grids have that
def test_ties_and_special_values_rank_as_in_the_rule(seed: int) -> None:
    caches, scores = make_layers(torch.bfloat16, 16, 4, layers=2, kv_heads=3)
    gen = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, 2 + 2 * seed, scores.shape, generator=gen)
    check_shared(caches, SPECIAL[picks], [FIRST, LATER], seed=seed)


def test_lanes_go_back_and_forth() -> None:
    """Evictions of one request, whose heads' needs change; ranked blocks go, fresh ones come."""
    caches, scores = make_layers(torch.float32, 16, 4, layers=2, kv_heads=3, blocks=20)
    tables = LaneTables.empty(2, 20, 3, SLOTS, SLOTS, "cpu")
    owners = own_lanes(2, 20, 3).clone()
    gen = torch.Generator().manual_seed(1)
    heavy, fresh, left = list(range(1, 7)), [7, 8], list(range(9, 20))
    known: list[int] = []
    changed = 0
    for _ in range(6):
        order = [*heavy, *fresh]
        count = len(order) - 2
        one = SharedEviction(order[:count], order[count:], [b for b in order if b not in known], 2)
        want = [cache.clone() for cache in caches]
        want_scores = scores.clone()
        layers = KVLayers(*zip(*(halves(cache) for cache in caches), strict=True), 1 << 16)
        compact_shared(layers, scores, tables, SharedEvictions.pack([one], "cpu"))
        views = zip(*(halves(cache) for cache in want), strict=True)
        now = rule(*views, want_scores, one.heavy, one.doomed, owners[:, order])
        changed += int((now != owners[:, one.heavy]).sum())
        assert torch.equal(tables.owners[:, list(one.heavy)].int(), now)
        assert torch.equal(bits(scores), bits(want_scores))
        for a, b in zip(caches, want, strict=True):
            assert torch.equal(bits(a), bits(b))
        owners[:, one.heavy] = now
        known, heavy = list(one.heavy), list(one.heavy)
        fresh, left = left[:2], left[2:]
        for block in fresh:
            owners[:, block] = torch.arange(3, dtype=torch.int32)
        scores *= 0.2 + 2 * torch.rand(2, 1, 3, 1, generator=gen)
    assert changed > 10


@settings(max_examples=12, deadline=None)
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
    one = SharedEviction(order[:heavy], order[heavy:total], order[total - fresh : total], 0)
    check_shared(caches, SPECIAL[picks], [one], seed=seed)


@pytest.mark.parametrize("protected", [3, 4, 9, 17, 40])
def test_protected_tokens_have_lanes_first(protected: int) -> None:
    """As far as there are any: also where they alone need more than there are."""
    caches, scores = make_layers(torch.float32, 16, 4, layers=2, kv_heads=3)
    first = [*FIRST.heavy, *FIRST.doomed]
    for head in range(3):
        count = protected if head != 1 else protected // 2
        for at in range(min(count, 4 * len(first))):
            scores[:, first[at // 4], head, at % 4] = float("inf")
    check_shared(caches, uneven(scores), [FIRST])


def test_shares_equal_the_rule_for_any_wants() -> None:
    """One block of a lane's size per head, with ties and remainders of all kinds."""
    gen = torch.Generator().manual_seed(4)
    for heads in (3, 8):
        caches, _ = make_layers(torch.float32, 16, 4, layers=4, kv_heads=heads)
        scores = torch.randint(0, 4, (4, 12, heads, 4), generator=gen).float()
        scores *= torch.randint(0, 3, (4, 1, heads, 1), generator=gen)
        tables = check_shared(caches, scores, [FIRST])
        order = [*FIRST.heavy, *FIRST.doomed]
        for layer in range(4):
            candidates = scores[layer, order].transpose(0, 1).flatten(1)
            want = share_lanes(list(candidates), 3 * heads, 4)
            assert tables.offsets[layer, FIRST.slot].diff().tolist() == want


def test_many_candidates_are_looked_at_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["h2o_vllm.kernels.triton.compact_shared"], "_CHUNK", 16)
    caches, scores = make_layers(torch.bfloat16, 16, 4, layers=2, kv_heads=3)
    check_shared(caches, (uneven(scores) * 6).round(), [FIRST, LATER])


def test_a_small_scratch_takes_more_launches() -> None:
    caches, scores = make_layers(torch.bfloat16, 16, 4, kv_heads=3)
    one_layer = 4 * unit_words(8, 3, 3, 4)
    check_shared(caches, uneven(scores), [FIRST, LATER], scratch_bytes=-(-one_layer // 8) * 8)
    with pytest.raises(ValueError, match="do not fit"):
        check_shared(caches, scores, [FIRST, LATER], scratch_bytes=one_layer - 8)


def test_no_eviction_does_nothing() -> None:
    check_shared(*make_layers(layers=2), [])
