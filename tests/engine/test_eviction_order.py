# SPDX-License-Identifier: Apache-2.0
"""The evictions of one step commute: whatever their order, a real scheduler's plans give the same bytes."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.cpu.state import CPUState
from h2o_vllm.engine.worker.state import waves
from h2o_vllm.policy.policy import Policy
from tests.engine.plan_checks import check_commuting
from tests.engine.scheduling import Rig

H2O, KEY = (Policy.parse(name).indices() for name in ("h2o", "key"))
NUM_BLOCKS, LAYERS, KV_HEADS, SIZE = 50, 2, 2, 16
PROMPT = list(range(1000, 1200))


def given_on(model_dir: str) -> tuple[Eviction, ...]:
    """A plan in which one gives back its share of a block, then another, whose alone it is now, is squeezed.

    Blocks run out in the step in which "gives" evicts: it needs one, and its share frees none.
    """
    rig = Rig(model_dir, 17, max_num_batched_tokens=512)
    rig.add("others", range(9000, 9100), None, max_tokens=60)
    window = {"kv_budget": 0.1, "kv_policy": "window", "kv_protect": 64}
    rig.add("gives", PROMPT[:126], window, max_tokens=40)
    rig.step()
    elastic = {"kv_budget": 0.1, "kv_policy": "key", "kv_protect": 64, "kv_elastic": True}
    rig.add("takes", PROMPT[:120], elastic, max_tokens=40)
    while rig.scheduler.has_unfinished_requests():
        evictions: tuple[Eviction, ...] = rig.step().h2o.evictions
        if len(evictions) == 2 and {*evictions[0].doomed_blocks} & {*evictions[1].heavy_blocks}:
            return evictions
    raise AssertionError("no block was given on")


def one_beginning(model_dir: str) -> tuple[Eviction, ...]:
    """A plan in which five evict for the first time, and rank the same doomed blocks, some of them fewer."""
    rig = Rig(model_dir, NUM_BLOCKS, max_num_batched_tokens=1024)
    by_key = {"kv_budget": 0.2, "kv_policy": "key"}
    rig.add("ranks", PROMPT[::-1], {"kv_budget": 0.2}, max_tokens=40)
    for number, asked in enumerate(({}, {}, {"kv_budget": 0.5}, {"kv_recent": 0.0}, {})):
        # Each goes on in its own way.
        prompt = [*PROMPT[:160], *range(2000 * (number + 1), 2000 * (number + 1) + 40)]
        rig.add(f"{number}", prompt, by_key | asked, max_tokens=40)
    rig.step()
    evictions: tuple[Eviction, ...] = rig.step().h2o.evictions
    assert len(evictions) == 6
    return evictions


def state_before(sharing: Sequence[Eviction] = ()) -> CPUState:
    """Random KV and scores; heads share slots where these evict who need no scores."""
    gen = torch.Generator().manual_seed(0)
    kv = [torch.randn(NUM_BLOCKS, KV_HEADS, 16, 2 * SIZE, generator=gen) for _ in range(LAYERS)]
    state = CPUState(
        planes=torch.rand(2, LAYERS, NUM_BLOCKS, KV_HEADS, 16, generator=gen),
        kv_cache_group=0,
        first_head=0,
        kv_caches=kv,
        row_request_ids=list,
        sharing={one.request_id for one in sharing if one.ranks == KEY},
    )
    # Of those that have evicted before.
    centre = torch.randn(LAYERS, 1, KV_HEADS, 2 * SIZE + 1, generator=gen).abs_()
    state._centres = defaultdict(lambda: centre)
    return state


def written(
    evictions: Sequence[Eviction], *, one_by_one: bool, sharing: bool = False
) -> list[Tensor]:
    """All scores and KV. What several leave beside the tokens that they doom means nothing, and is cleared.

    Args:
        sharing: heads of those who need no scores share slots.
    """
    state = state_before(evictions if sharing else ())
    for part in [[one] for one in evictions] if one_by_one else [list(evictions)]:
        state.compact(part)
    doomed = Counter(block for one in evictions if one.heavy_blocks for block in one.doomed_blocks)
    state.scores[:, [block for block, count in doomed.items() if count > 1]] = 0
    return [state.scores, *state.kv_caches]


def check_orders(evictions: Sequence[Eviction], *, sharing: bool = False) -> int:
    """Whatever the order, the same bytes. Returns how many orders were tried."""
    check_commuting(evictions)
    expected = written(evictions, one_by_one=False, sharing=sharing)
    orders = list(itertools.islice(itertools.permutations(evictions), 12))
    for order in orders:
        found = written(order, one_by_one=True, sharing=sharing)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return len(orders)


def test_who_moves_nothing_may_give_on_what_is_written_at_once(model_dir: str) -> None:
    gives, takes = given_on(model_dir)
    assert not gives.heavy_blocks and takes.heavy_blocks
    assert check_orders([gives, takes]) == 2


@pytest.mark.parametrize("sharing", [False, True], ids=["equal-heads", "shared-heads"])
def test_who_ranks_what_others_rank_does_so_as_if_alone(model_dir: str, sharing: bool) -> None:
    """Different candidates give the same token different scores."""
    evictions = one_beginning(model_dir)
    turns = waves(evictions)
    assert [len(wave) for wave in turns] == [2, 1, 1, 1, 1]
    assert len({one.doomed_blocks for one in evictions}) == 3
    assert check_orders(evictions, sharing=sharing) == 12
    together = state_before(evictions if sharing else ())
    together.compact(evictions)
    for one in evictions:
        alone = state_before(evictions if sharing else ())
        alone.compact([one])
        blocks = list(one.heavy_blocks)
        for layer, kept in enumerate(together.kv_caches):
            assert torch.equal(kept[blocks], alone.kv_caches[layer][blocks]), one.request_id
        assert torch.equal(together.scores[:, blocks], alone.scores[:, blocks]), one.request_id


def test_evictions_that_do_not_commute_are_noticed() -> None:
    """What an earlier one dooms must not be what a later one writes."""
    first = Eviction("a", (1, 2), (3, 4), (0, 1), H2O)
    for later in (
        Eviction("b", (3,), (5,), (0,), H2O),
        Eviction("b", (2,), (5,), (0,), H2O),
        Eviction("b", (6,), (4,), (0,), H2O),
        Eviction("a", (6,), (5,), (0,), H2O),
    ):
        with pytest.raises(AssertionError):
            check_commuting([first, later])
    # Without scores blocks may be doomed by two, but none that either has written before.
    unscored = Eviction("a", (1, 2), (3, 4), (0, 1), KEY, (1, 2, 3, 4))
    check_commuting([unscored, Eviction("b", (6,), (4,), (0,), KEY, (4, 6))])
    with pytest.raises(AssertionError):
        check_commuting([unscored, Eviction("b", (6,), (4,), (0,), KEY, (6,))])
    overlapping = [first, Eviction("b", (3,), (5,), (0,), H2O)]
    there, back = written(overlapping, one_by_one=True), written(overlapping[::-1], one_by_one=True)
    assert not all(torch.equal(a, b) for a, b in zip(there, back, strict=True))


def test_waves_keep_apart_what_meets_and_nothing_else() -> None:
    def ranks(name: str, heavy: tuple[int, ...], doomed: tuple[int, ...]) -> Eviction:
        return Eviction(name, heavy, doomed, doomed)

    first, second, third = ranks("a", (1,), (2, 3)), ranks("b", (4,), (3,)), ranks("c", (5,), (6,))
    nothing, meets_both = ranks("d", (), (3,)), ranks("e", (7,), (2, 6))
    assert waves([]) == []
    assert waves([first, second, third, nothing, meets_both]) == [
        [first, third, nothing],
        [second, meets_both],
    ]


def test_what_settles_in_blocks_that_another_gives_back_comes_after_it() -> None:
    gives_back = Eviction("a", (1,), (2, 3), (4, 5), places=(3,))
    takes = Eviction("b", (3,), (6, 7), (9,), places=(8,))
    found = Eviction("c", (1,), (), (9,), places=(8,))
    assert waves([gives_back, takes, found]) == [[gives_back, found], [takes]]
