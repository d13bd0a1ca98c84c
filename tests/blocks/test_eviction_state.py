# SPDX-License-Identifier: Apache-2.0
"""One request's eviction state, without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from h2o_vllm.blocks.eviction_state import EvictionState
from h2o_vllm.config import H2OConfig


@dataclass
class Counts:
    """As much of a request as its eviction state reads."""

    num_prompt_tokens: int
    max_tokens: int = 4096
    num_computed_tokens: int = 0
    num_tokens: int = 0

    def is_finished(self) -> bool:
        return False


def make_state(prompt: int, block_size: int = 16, **asked: object) -> EvictionState:
    budget = H2OConfig(kv_min_tokens=16).resolve(asked)
    return EvictionState(Counts(prompt, num_tokens=prompt + 1), budget, block_size, 8192)


def test_nothing_is_evicted_before_the_prompt_is_computed() -> None:
    one = make_state(400, kv_budget=0.1)
    assert [one.evict(computed) for computed in range(0, 400, 16)] == [None] * 25
    assert one.evict(400) is not None


def test_the_first_eviction_frees_exactly_what_was_published() -> None:
    one = make_state(400, kv_budget=0.2)
    published = one.publishable_tokens(400) // 16
    split = one.evict(400)
    assert split is not None
    assert split.doomed == tuple(range(published))
    assert published == 20


def test_recent_blocks_are_neither_written_nor_freed() -> None:
    one = make_state(400, kv_budget=0.2, kv_recent=0.5)
    for computed in range(400, 900):
        split = one.evict(computed)
        if split is not None:
            recent = round(0.5 * 0.2 * computed)
            end = (max(split.heavy + split.doomed) + 1) * 16
            assert end <= computed
            assert abs(end - (computed - recent)) <= 8


def test_a_budget_of_one_never_evicts_and_publishes_everything() -> None:
    one = make_state(400, kv_budget=1.0)
    assert not one.evicts
    assert one.publishable_tokens(412) == 412


def test_kv_computed_after_an_eviction_is_never_published() -> None:
    """Law 7, for the policy that may publish beyond its first eviction."""
    one = make_state(100, kv_budget=0.5, kv_policy="window")
    assert one.publishable_tokens(100) == 100
    assert one.evict(100) is not None
    assert one.publishable_tokens(164) == 100
    one.release()
    assert one.publishable_tokens(96) == 96


def test_replay_stops_at_every_eviction_of_the_first_run() -> None:
    first = make_state(300, kv_budget=0.3)
    stops = [computed for computed in range(300, 700) if first.evict(computed) is not None]
    replay = make_state(300, kv_budget=0.3)
    computed, visited = 0, []
    while computed < 700:
        if replay.evict(computed) is not None:
            visited.append(computed)
        computed += replay.chunk_limit(computed, min(64, 700 - computed))
    assert visited == stops
    assert len(stops) > 5


def test_the_report_adds_up() -> None:
    one = make_state(400, kv_budget=0.2)
    one.counts.num_computed_tokens = 450  # type: ignore[misc]
    one.counts.num_tokens = 451  # type: ignore[misc]
    for computed in range(400, 450):
        one.evict(computed)
    report = one.report()
    assert report["tokens_seen"] == 450
    assert report["tokens_held"] + report["tokens_evicted"] == 450
    assert report["budget_tokens"] == 90
    assert 90 <= report["tokens_held"] < 90 + 16


def test_fresh_blocks_are_those_never_ranked() -> None:
    one = make_state(400, kv_budget=0.2)
    ranked: set[int] = set()
    for computed in range(400, 900):
        evicted = one.evict(computed)
        if evicted is not None:
            assert not ranked & set(evicted.fresh)
            assert {*evicted.heavy, *evicted.doomed} <= ranked | set(evicted.fresh)
            ranked |= set(evicted.fresh)
    assert ranked == set(range(max(ranked) + 1))


@pytest.mark.parametrize("policy", ["h2o", "window"])
@pytest.mark.parametrize("recent", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("sinks", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (200, 13)])
def test_there_is_always_room_for_protected_tokens(
    sinks: int, blocks: int, recent: float, policy: str
) -> None:
    one = make_state(400, kv_budget_tokens=1, kv_recent=recent, kv_sinks=sinks, kv_policy=policy)
    evictions = 0
    for computed in range(400, 900):
        evicted = one.evict(computed)
        if evicted is None:
            continue
        evictions += 1
        assert len(one._candidates) >= blocks
        assert max((*evicted.heavy, *evicted.doomed)) < computed // 16
        if policy == "window":
            assert min(evicted.doomed) >= blocks
        one.counts.num_computed_tokens = computed  # type: ignore[misc]
        one.counts.num_tokens = computed + 1  # type: ignore[misc]
        report = one.report()
        assert report["sinks"] == sinks
        assert report["budget_tokens"] == max(16, blocks * 16)
    assert evictions > 10
