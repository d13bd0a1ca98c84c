# SPDX-License-Identifier: Apache-2.0
"""Heads that share the slots of their heavy blocks: attention, compaction and ranking equal plain torch."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu import checks, reference
from h2o_vllm.kernels.cpu.batch import Lanes, key_value_views
from h2o_vllm.kernels.lanes import own_lanes, share_lanes
from tests.kernels.cpu.cases import Batch, assert_no_worse, make_batch
from tests.kernels.cpu.test_attend import DTYPES
from tests.kernels.cpu.test_evict import BLOCKS, bits, ids, make

SHAPES = [(1, 64, 32), (3, 64, 16), (4, 80, 16), (7, 96, 32), (8, 128, 128)]
"""group, head size, block size"""
HEADS = 3


def owners_of(blocks: int, heads: int, gen: torch.Generator) -> Tensor:
    """[blocks, heads]: whose each lane is; head 0 has most of them, and each at least one."""
    owners = torch.randint(0, 2 * heads, (blocks * heads,), generator=gen) % (heads + 2) % heads
    owners[torch.randperm(len(owners), generator=gen)[:heads]] = torch.arange(heads)
    return owners.view(blocks, heads).int()


def lanes_of(batch: Batch, heavy: list[int], *, own: bool = False) -> Lanes:
    """The first ``heavy[row]`` blocks of each row are shared; 0: the row shares none."""
    gen = torch.Generator().manual_seed(5)
    heads, shared = batch.kv_cache.shape[1], [row for row, count in enumerate(heavy) if count]
    rows = torch.full((len(heavy),), -1, dtype=torch.int32)
    # Other slots than the rows' numbers, and pages behind the last one that nobody may follow.
    pages = torch.full((len(shared) + 1, heads, max(heavy) * heads), -(2**30), dtype=torch.int32)
    counts = torch.full((len(shared) + 1, heads), -(2**30), dtype=torch.int32)
    blocks = torch.full((len(shared) + 1,), -(2**30), dtype=torch.int32)
    for place, row in enumerate(reversed(shared)):
        count = heavy[row]
        owners = own_lanes(1, count, heads)[0] if own else owners_of(count, heads, gen)
        every = batch.block_table[row, :count, None] * heads + torch.arange(
            heads, dtype=torch.int32
        )
        rows[row], blocks[place] = place, count
        for head in range(heads):
            mine = every[owners == head]
            pages[place, head, : len(mine)], counts[place, head] = mine, len(mine)
    return Lanes(rows, pages, counts, blocks)


def plain(batch: Batch, lanes: Lanes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and scores of all rows as plain torch has them, computed in ``dtype``."""
    out, scores = batch.out().to(dtype), batch.scores.clone()
    keys, values = (half.flatten(0, 1) for half in key_value_views(batch.kv_cache))
    _, heads, block_size = batch.scores.shape
    group, by_page = batch.query.shape[1] // heads, scores.view(-1, block_size)
    for row, live in enumerate(batch.seq_lens.tolist()):
        start, end = batch.query_start_loc[row : row + 2].tolist()
        place = int(lanes.rows[row])
        table = batch.block_table[row, : -(-live // block_size)].long()
        for head in range(heads):
            pages, length = table * heads + head, live
            if place >= 0:
                count, heavy = int(lanes.counts[place, head]), int(lanes.heavy[place])
                pages = torch.cat([lanes.pages[place, head, :count].long(), pages[heavy:]])
                length += (count - heavy) * block_size
            key = keys[pages].mT.flatten(0, 1)[:length].to(dtype)
            value = values[pages].flatten(0, 1)[:length].to(dtype)
            mine = slice(head * group, (head + 1) * group)
            logits = batch.query[start:end, mine].to(dtype) @ key.T * batch.scale
            if batch.softcap:
                logits = batch.softcap * (logits / batch.softcap).tanh()
            future = torch.ones(end - start, length).triu(length - (end - start) + 1).bool()
            logits = logits.masked_fill(future[:, None], float("-inf"))
            if batch.sinks is not None:
                sinks = batch.sinks[mine].to(dtype).expand(end - start, -1)
                logits = torch.cat([logits, sinks[..., None]], -1)
            prob = logits.softmax(-1)[..., :length]
            out[start:end, mine] = prob @ value
            slots = torch.arange(length)
            received = prob.sum((0, 1)).float()
            by_page[pages[slots // block_size], slots % block_size] += received
    return out, scores


def check(batch: Batch, lanes: Lanes, out: Tensor | None, scores: Tensor | None) -> None:
    exact, exact_scores = plain(batch, lanes, torch.float64)
    rough, rough_scores = plain(batch, lanes, batch.query.dtype)
    if out is not None:
        assert_no_worse(out, exact, rough, 4e-6 if out.dtype == torch.float32 else 1e-3)
    if scores is None:
        return
    used = (batch.used_scores(one) for one in (scores, exact_scores, rough_scores))
    assert_no_worse(*used, 2e-5)
    assert scores[batch.poisoned].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size", "block_size"), SHAPES)
def test_decodes_equal_plain_torch(
    impl: ModuleType, group: int, size: int, block_size: int, dtype: torch.dtype
) -> None:
    lengths = [n * block_size + more for n, more in ((1, 1), (5, 0), (4, 7), (9, 3), (2, 0))]
    batch = make_batch(
        lengths, kv_heads=HEADS, group=group, size=size, block_size=block_size, dtype=dtype
    )
    lanes = lanes_of(batch, [1, 3, 0, 6, 2])
    for scored in (None, 2, 0):
        out, scores = batch.out(), batch.scores.clone()
        paged = batch.paged(scores)._replace(lanes=lanes)
        impl.attend_decode(paged, batch.rows, batch.rows, batch.scale, out, scored)
        check(batch, lanes, out, scores if scored is None else None)
        if scored == 0:
            assert torch.equal(bits(scores), bits(batch.scores))


@pytest.mark.parametrize("threads", [1, 2, 5], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_shared_by_threads_equal_plain_torch(
    impl: ModuleType, threads: int, dtype: torch.dtype
) -> None:
    """Heads of a row are split differently, as they hold different numbers of tokens."""
    batch = make_batch([2200, 900, 1800], kv_heads=HEADS, dtype=dtype)
    lanes = lanes_of(batch, [60, 0, 40])
    for scored in (None, 0):
        out, scores = batch.out(), batch.scores.clone()
        paged = batch.paged(scores)._replace(lanes=lanes)
        impl.attend_decode(paged, batch.rows, batch.rows, batch.scale, out, scored)
        check(batch, lanes, out, scores if scored is None else None)
    batch = make_batch([700, 500], [300, 400], kv_heads=HEADS, dtype=dtype)
    lanes = lanes_of(batch, [10, 3])
    for scored in (None, 0):
        out, scores = batch.out(), batch.scores.clone()
        paged = batch.paged(scores)._replace(lanes=lanes)
        arguments = (batch.query_start_loc, batch.rows, batch.scale, out, scored)
        impl.attend_prompt(paged, *arguments)
        check(batch, lanes, out, scores if scored is None else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "size", "block_size"), SHAPES)
def test_later_chunks_of_a_prompt_equal_plain_torch(
    impl: ModuleType, group: int, size: int, block_size: int, dtype: torch.dtype
) -> None:
    shape = {"kv_heads": HEADS, "group": group, "size": size, "block_size": block_size}
    lengths = [5 * block_size + 70, 3 * block_size + 33, 2 * block_size + 2]
    batch = make_batch(lengths, [70, 20, 2], dtype=dtype, **shape)
    lanes = lanes_of(batch, [4, 0, 2])
    for with_output, scored in ((True, None), (True, 0), (False, None)):
        out, scores = batch.out() if with_output else None, batch.scores.clone()
        paged = batch.paged(scores)._replace(lanes=lanes)
        arguments = (paged, batch.query_start_loc, batch.rows, batch.scale)
        if out is None:
            impl.score_prompt(*arguments)
        else:
            impl.attend_prompt(*arguments, out, scored)
        check(batch, lanes, out, scores if scored is None else None)


def test_soft_caps_and_sinks_are_those_of_each_head(impl: ModuleType) -> None:
    batch = make_batch([200, 90], [60, 1], kv_heads=HEADS, spread=20.0)
    batch.softcap, batch.sinks = 8.0, torch.linspace(-3, 9, HEADS * 3)
    lanes = lanes_of(batch, [4, 2])
    out, scores = batch.out(), batch.scores.clone()
    paged = batch.paged(scores)._replace(lanes=lanes)
    impl.attend_prompt(
        paged, batch.query_start_loc, batch.rows, batch.scale, out, None, **batch.softmax
    )
    check(batch, lanes, out, scores)


def test_the_reference_equals_plain_torch() -> None:
    batch = make_batch([200, 90, 70], [60, 1, 5], kv_heads=HEADS)
    lanes = lanes_of(batch, [4, 2, 0])
    out, scores = batch.out(), batch.scores.clone()
    paged = batch.paged(scores)._replace(lanes=lanes)
    reference.attend_prompt(paged, batch.query_start_loc, batch.rows, batch.scale, out)
    check(batch, lanes, out, scores)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("queries", [[1, 1, 1], [40, 1, 200]], ids=["decode", "prompt"])
def test_lanes_that_are_everybodys_own_change_no_bit(
    impl: ModuleType, threads: int, queries: list[int]
) -> None:
    batch = make_batch([2500, 70, 600], queries, kv_heads=HEADS, dtype=torch.bfloat16)
    results = []
    for lanes in (None, lanes_of(batch, [50, 2, 9], own=True)):
        out, scores = batch.out(), batch.scores.clone()
        paged = batch.paged(scores)._replace(lanes=lanes)
        if len(batch.query) == len(batch.rows):
            impl.attend_decode(paged, batch.rows, batch.rows, batch.scale, out)
        else:
            impl.attend_prompt(paged, batch.query_start_loc, batch.rows, batch.scale, out)
        results.append((out, batch.used_scores(scores)))
    # torch multiplies matrices of one head otherwise than those of several.
    exact = impl.__name__.endswith("cpp")
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=0 if exact else 1e-2, atol=0 if exact else 1e-4
        )


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_a_row_does_not_depend_on_its_batch(impl: ModuleType, threads: int) -> None:
    batch = make_batch([2600, 33, 70, 1200, 64], kv_heads=HEADS, dtype=torch.bfloat16)
    lanes = lanes_of(batch, [60, 0, 2, 20, 1])
    together, scores = batch.out(), batch.scores.clone()
    paged = batch.paged(scores)._replace(lanes=lanes)
    impl.attend_decode(paged, batch.rows, batch.rows, batch.scale, together)
    alone, alone_scores = batch.out(), batch.scores.clone()
    for row in batch.rows.split(1):
        paged = batch.paged(alone_scores)._replace(lanes=lanes)
        impl.attend_decode(paged, row, row, batch.scale, alone)
    assert torch.equal(together, alone)
    assert torch.equal(batch.used_scores(scores), batch.used_scores(alone_scores))


def compare(
    impl: ModuleType, caches: list[Tensor], scores: Tensor, heavy: Tensor, doomed: Tensor, owners: Tensor
) -> Tensor:  # fmt: skip
    """Compacts, as the reference does; returns the new owners."""
    got, got_scores = [cache.clone() for cache in caches], scores.clone()
    want, want_scores = [cache.clone() for cache in caches], scores.clone()
    now = impl.compact_shared(got, got_scores, heavy, doomed, owners)
    assert torch.equal(now, reference.compact_shared(want, want_scores, heavy, doomed, owners))
    assert torch.equal(bits(got_scores), bits(want_scores))
    untouched = [block for block in range(BLOCKS) if block not in heavy.tolist()]
    assert torch.equal(bits(got_scores[:, untouched]), bits(scores[:, untouched]))
    for a, b, before in zip(got, want, caches, strict=True):
        assert torch.equal(bits(a), bits(b))
        assert torch.equal(bits(a[untouched]), bits(before[untouched]))
    return now


def wide(dtype: torch.dtype, size: int, block_size: int) -> tuple[list[Tensor], Tensor]:
    """As ``make``, with four heads of which some need more than others."""
    pairs = [make(dtype, size, block_size, seed) for seed in (1, 2)]
    caches = [torch.cat(two, dim=1) for two in zip(*(caches for caches, _ in pairs), strict=True)]
    scores = torch.cat([scores for _, scores in pairs], dim=2)
    return caches, scores * torch.tensor([0.2, 3.0, 0.7, 1.0])[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "block_size"), [(64, 32), (80, 16), (128, 128)])
def test_compaction_equals_the_reference(
    impl: ModuleType, dtype: torch.dtype, size: int, block_size: int
) -> None:
    """A first eviction, and one after it, of which a block that was ranked and a fresh one are doomed."""
    caches, scores = wide(dtype, size, block_size)
    layers, _, heads, _ = scores.shape
    heavy, doomed = ids(7, 2, 9), ids(1, 11, 4)
    owners = own_lanes(layers, 6, heads)
    now = compare(impl, caches, scores, heavy, doomed, owners)
    impl.compact_shared(caches, scores, heavy, doomed, owners)
    owners = torch.cat(
        [now[:, :2], own_lanes(layers, 1, heads), now[:, 2:], own_lanes(layers, 1, heads)], 1
    )
    compare(impl, caches, scores, ids(7, 2, 5), ids(9, 3), owners)


def test_each_head_keeps_its_best_tokens(impl: ModuleType) -> None:
    """Told by values: K, V and score of a token stay together, and a head's tokens stay its own."""
    caches, scores = wide(torch.float32, 16, 16)
    layers, _, heads, _ = scores.shape
    heavy, doomed = ids(7, 2, 9), ids(1, 11, 4, 5)
    order = [*heavy.tolist(), *doomed.tolist()]
    before = scores[:, order].transpose(1, 2).flatten(2)
    for cache, mine in zip(caches, scores, strict=True):
        keys, values = key_value_views(cache)
        keys.copy_(mine[:, :, None, :].expand_as(keys))
        values.copy_(mine[..., None].expand_as(values))
    now = impl.compact_shared(caches, scores, heavy, doomed, own_lanes(layers, 7, heads))
    for layer, cache in enumerate(caches):
        keys, values = key_value_views(cache[heavy.long()])
        for head in range(heads):
            lanes = now[layer] == head
            assert lanes.any()
            mine = scores[layer, heavy.long()][lanes].flatten()
            best = before[layer, head].topk(len(mine)).values
            assert torch.equal(mine.sort(descending=True).values, best)
            assert torch.equal(keys.transpose(2, 3)[lanes].flatten(0, 1)[:, 0], mine)
            assert torch.equal(values[lanes].flatten(0, 1)[:, -1], mine)
        # The one whose scores are three times as high has more than its share.
        assert (now[layer] == 1).sum() > len(heavy)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_compaction_equals_the_reference_on_any_scores(data: st.DataObject) -> None:
    """Many ties, infinities, NaN and both zeros; any split of the blocks; lanes of anybody's."""
    impl = kernels.load()
    order = data.draw(st.permutations(range(1, BLOCKS)))
    heavy, doomed = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    caches, scores = wide(torch.bfloat16, 16, 16)
    gen = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    special = torch.tensor([0.0, -0.0, 1.0, 2.5, float("-inf"), float("nan"), 1e-40])
    picks = torch.randint(0, data.draw(st.integers(1, len(special))), scores.shape, generator=gen)
    scores = special[picks]
    # Protected tokens are first ones of a request: some of one block, for all heads.
    scores[:, order[data.draw(st.integers(0, heavy + doomed - 1))], :, :5] = float("inf")
    owners = torch.stack([owners_of(heavy + doomed, 4, gen) for _ in caches])
    now = compare(
        impl, caches, scores, ids(*order[:heavy]), ids(*order[heavy : heavy + doomed]), owners
    )
    assert all(set(layer.flatten().tolist()) == {0, 1, 2, 3} for layer in now)


@pytest.mark.parametrize(
    ("wanted", "lanes", "given"),
    [
        ([40, 24], 4, [3, 1]),  # 2.5 and 1.5 lanes: of equal remainders the lower head's
        ([39, 25], 4, [2, 2]),
        ([64, 0, 0], 4, [2, 1, 1]),  # one lane each
        ([56, 4, 4], 4, [2, 1, 1]),
        ([33, 16, 15], 4, [2, 1, 1]),
        ([20, 20, 40], 5, [1, 1, 3]),  # 1.25, 1.25, 2.5
    ],
)
def test_shares_are_rounded_to_lanes(wanted: list[int], lanes: int, given: list[int]) -> None:
    scores = [torch.tensor([1.0] * want + [0.0] * (96 - want)) for want in wanted]
    assert share_lanes(scores, lanes, 16) == given


def test_protected_tokens_have_lanes_first() -> None:
    """17 protected tokens need two lanes, though 1.1 of four would be rounded to one."""
    scores = [torch.tensor([float("inf")] * 17 + [0.0] * 79), torch.full((96,), 1.0)]
    assert share_lanes(scores, 4, 16) == [2, 2]


def test_protected_tokens_keep_their_lanes_beside_hungrier_heads(impl: ModuleType) -> None:
    """Head 0 has 17 protected tokens and wants no other; the others want all lanes there are."""
    caches, scores = wide(torch.float32, 16, 16)
    scores[:, [1, 2, 7]] = 1.0
    scores[:, [1, 2, 7], 0] = 0.0
    scores[:, 1, 0] = scores[:, 2, 0, 0] = float("inf")
    owners = torch.arange(4).expand(len(caches), 3, -1)
    now = compare(impl, caches, scores, ids(1, 2), ids(7), owners)
    assert (now == 0).sum((1, 2)).tolist() == [2] * len(caches)


def test_more_protected_tokens_than_lanes_hold_are_no_error(impl: ModuleType) -> None:
    """The scheduler leaves lanes for all of them. Should it not, a head goes short; nothing else happens."""
    caches, scores = wide(torch.float32, 16, 16)
    scores.fill_(float("inf"))
    owners = torch.tensor([[1, 1, 1, 1], [1, 0, 2, 3], [0, 1, 1, 3]]).expand(len(caches), -1, -1)
    now = compare(impl, caches, scores, ids(7), ids(1, 11), owners)
    assert now.sort().values.tolist() == [[[0, 1, 2, 3]]] * len(caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_policies_ask_of_pages_equals_the_reference(
    impl: ModuleType, dtype: torch.dtype
) -> None:
    """Each head has its own number of them; padding is in nobody's mean, and nothing else is read."""
    caches, _ = wide(dtype, 64, 32)
    heads = caches[0].shape[1]
    pages = torch.full((len(caches), heads, 5), -1, dtype=torch.int32)
    gen = torch.Generator().manual_seed(3)
    for layer, cache in enumerate(caches):
        mine = torch.randperm(cache.shape[0] * heads - heads, generator=gen) + heads
        for head in range(heads):
            pages[layer, head, head + 1 - layer % 2 :], mine = (
                mine[: 4 - head + layer % 2],
                mine[5:],
            )
        unread = torch.ones(cache.shape[0] * heads, dtype=torch.bool)
        unread[pages[layer][pages[layer] >= 0].long()] = False
        cache.view(-1, *cache.shape[2:])[unread] = float("nan")
    for name in ("key_likeness", "value_distances"):
        got, want = (getattr(one, name)(caches, pages) for one in (impl, reference))
        assert got.shape == want.shape == (len(caches), heads, 5 * 32)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
        assert (got.unflatten(-1, (5, 32))[pages < 0] == 0).all()
        block = caches[1].view(-1, 1, *caches[1].shape[2:])
        alone = getattr(reference, name)([block], pages[1, 2][pages[1, 2] >= 0])
        torch.testing.assert_close(got[1, 2, -alone.shape[-1] :], alone[0, 0], rtol=2e-5, atol=2e-6)


def test_lanes_that_cannot_be_are_refused() -> None:
    batch = make_batch([200, 90], kv_heads=HEADS)
    lanes = lanes_of(batch, [4, 0])
    checks.check_batch(batch.paged()._replace(lanes=lanes), batch.rows)
    taken = lanes.pages.clone()
    taken[0, 1, 0] = taken[0, 0, 0]
    for bad, message in (
        (lanes._replace(pages=taken), "not those of its 4 heavy blocks"),
        (lanes._replace(counts=torch.zeros_like(lanes.counts)), "none, or too many"),
        (lanes._replace(heavy=lanes.heavy + 1), "not those of its 5"),
        (lanes._replace(pages=lanes.pages.long()), "int64"),
    ):
        with pytest.raises(ValueError, match=message):
            checks.check_batch(batch.paged()._replace(lanes=bad), batch.rows)
    scores = torch.zeros(1, 9, HEADS, 32)
    checks.check_owners(own_lanes(1, 3, HEADS), scores, 3)
    with pytest.raises(ValueError, match=r"all of the heads 0\.\.2"):
        checks.check_owners(torch.zeros(1, 3, HEADS, dtype=torch.int32), scores, 3)
    caches = [torch.zeros(9, HEADS, 32, 32)]
    with pytest.raises(ValueError, match="padding must come before"):
        checks.check_ranked(torch.tensor([[[5, -1], [6, 7], [8, 9]]]), caches)
