# SPDX-License-Identifier: Apache-2.0
"""The evictions of one step commute: whatever their order, a real scheduler's plans give the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.engine.cpu.state import CPUState
from tests.engine.scheduling import Rig, check_commuting

NUM_BLOCKS, LAYERS, KV_HEADS, SIZE = 26, 2, 2, 16
PROMPT = list(range(1000, 1200))
POLICIES = (
    "h2o",
    "caote",
    "snapkv",
    "keydiff",
    "caote-keydiff",
    "snapkv-keydiff",
    "caote-snapkv-keydiff",
    "window",
    "tova",
)


def crowded_steps(model_dir: str, *, pipelined: bool) -> list[tuple[Eviction, ...]]:
    """Plans with several evictions, from a pool so small that blocks change hands at once.

    Requests that evict in one step, others that are preempted in it, blocks shared through the cache.
    """
    rig = Rig(
        model_dir,
        NUM_BLOCKS,
        policy="priority",
        pipelined=pipelined,
        max_num_batched_tokens=512,
        kv_min_tokens=16,
    )
    plans = []
    number = 0
    while number < 48 or rig.scheduler.has_unfinished_requests():
        while number < 48 and len(rig.scheduler.requests) < 8:
            asked = {
                "kv_budget": 0.3 + 0.1 * (number % 3),
                "kv_policy": POLICIES[number % len(POLICIES)],
            }
            length = 40 + 16 * (number % 4)
            rig.add(str(number), PROMPT[:length], asked, max_tokens=60, priority=number % 3)
            number += 1
        plan = rig.step().h2o
        if len(plan.evictions) > 1:
            plans.append(plan.evictions)
    assert rig.preemptions > 0
    return plans


def given_on(model_dir: str) -> tuple[Eviction, ...]:
    """A plan in which one gives back its share of a block, then another, whose alone it is now, is squeezed.

    Blocks run out in the step in which "gives" evicts: it needs one, and its share frees none.
    """
    rig = Rig(model_dir, 17, max_num_batched_tokens=512, kv_min_tokens=16)
    rig.add("others", range(9000, 9100), None, max_tokens=60)
    window = {"kv_budget": 0.1, "kv_policy": "window", "kv_protect": 64}
    rig.add("gives", PROMPT[:126], window, max_tokens=40)
    rig.step()
    elastic = {"kv_budget": 0.1, "kv_policy": "keydiff", "kv_protect": 64, "kv_elastic": True}
    rig.add("takes", PROMPT[:120], elastic, max_tokens=40)
    while rig.scheduler.has_unfinished_requests():
        evictions: tuple[Eviction, ...] = rig.step().h2o.evictions
        if len(evictions) == 2 and {*evictions[0].doomed_blocks} & {*evictions[1].heavy_blocks}:
            return evictions
    raise AssertionError("no block was given on")


def state_before() -> CPUState:
    gen = torch.Generator().manual_seed(0)
    kv = [torch.randn(NUM_BLOCKS, KV_HEADS, 16, 2 * SIZE, generator=gen) for _ in range(LAYERS)]
    return CPUState(
        planes=torch.rand(2, LAYERS, NUM_BLOCKS, KV_HEADS, 16, generator=gen),
        kv_cache_group=0,
        first_kv_head=0,
        kv_caches=kv,
        row_request_ids=list,
    )


def written(evictions: Sequence[Eviction], *, one_by_one: bool) -> list[Tensor]:
    state = state_before()
    for part in [[one] for one in evictions] if one_by_one else [list(evictions)]:
        state.compact(part)
    return [state.scores, *state.kv_caches]


def check_orders(evictions: Sequence[Eviction]) -> int:
    """Whatever the order, the same bytes. Returns how many orders were tried."""
    check_commuting(evictions)
    expected = written(evictions, one_by_one=False)
    orders = list(itertools.islice(itertools.permutations(evictions), 12))
    for order in orders:
        found = written(order, one_by_one=True)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return len(orders)


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_evictions_of_one_step_commute(model_dir: str, pipelined: bool) -> None:
    plans = crowded_steps(model_dir, pipelined=pipelined)
    assert len(plans) > 20
    assert max(map(len, plans)) >= 3
    assert sum(map(check_orders, plans)) > 60


def test_who_moves_nothing_may_give_on_what_is_written_at_once(model_dir: str) -> None:
    gives, takes = given_on(model_dir)
    assert not gives.heavy_blocks and takes.heavy_blocks
    assert check_orders([gives, takes]) == 2


def test_evictions_that_do_not_commute_are_noticed() -> None:
    """What an earlier one dooms must not be what a later one writes."""
    first = Eviction("a", (1, 2), (3, 4), (0, 1))
    for later in (
        Eviction("b", (3,), (5,), (0,)),
        Eviction("b", (2,), (5,), (0,)),
        Eviction("b", (6,), (4,), (0,)),
        Eviction("a", (6,), (5,), (0,)),
    ):
        with pytest.raises(AssertionError):
            check_commuting([first, later])
    overlapping = [first, Eviction("b", (3,), (5,), (0,))]
    there, back = written(overlapping, one_by_one=True), written(overlapping[::-1], one_by_one=True)
    assert not all(torch.equal(a, b) for a, b in zip(there, back, strict=True))
