# SPDX-License-Identifier: Apache-2.0
"""One request's eviction state, without an engine."""

import math
from dataclasses import dataclass

import pytest

from h2o_vllm.blocks.counts.eviction_state import EvictionIndices, EvictionState
from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve_for
from tests.published import PUBLISHED


@dataclass
class Counts:
    """As much of a request as its eviction state reads."""

    num_prompt_tokens: int
    max_tokens: int = 4096
    num_computed_tokens: int = 0
    num_tokens: int = 0
    priority: int = 0
    arrival_time: float = 0.0

    def is_finished(self) -> bool:
        return False


def make_state(
    prompt: int, block_size: int = 16, max_tokens: int = 4096, **asked: object
) -> EvictionState:
    budget = resolve_for(
        H2OConfig(kv_min_tokens=16, kv_calibration="unread", **PUBLISHED), asked, prompt
    )
    counts = Counts(prompt, max_tokens, num_tokens=prompt + 1)
    return EvictionState(counts, budget, block_size, 8192)


@pytest.mark.parametrize(("protect", "pinned"), [(0, 0), (33, 3)])
def test_the_first_eviction_publishes_exactly_what_it_frees(protect: int, pinned: int) -> None:
    """Law 7. Not before: until then these tokens are to be ranked by their scores."""
    one = make_state(400, kv_budget=0.2, kv_protect=protect)
    assert one.publishable_tokens(400) == pinned * 16
    split = one.evict(400)
    assert one.publishable_tokens(400) == (pinned + len(split.doomed)) * 16
    assert split.doomed == tuple(range(pinned, pinned + (20 if not pinned else 17)))
    assert [one.evict(computed) for computed in range(401, 500)].count(None) < 99
    assert one.publishable_tokens(500) == (pinned + len(split.doomed)) * 16
    one.release()
    assert one.publishable_tokens(400) == pinned * 16


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


def test_the_report_counts_no_token_that_is_only_being_computed() -> None:
    """Asynchronous scheduling is a step ahead, and the last sampled token has no KV yet."""
    one = make_state(400, kv_budget=0.2)
    one.counts.num_computed_tokens, one.counts.num_tokens = 451, 451
    assert one.report()["tokens_seen"] == 450


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


def run(one: EvictionState, until: int) -> list[tuple[int, EvictionIndices]]:
    """Every eviction while tokens are generated, with the tokens seen."""
    seen = range(one.prompt_tokens, until)
    return [(n, evicted) for n in seen if (evicted := one.evict(n)) is not None]


@pytest.mark.parametrize("policy", ["h2o", "key"])
@pytest.mark.parametrize(("protect", "pinned"), [(1, 1), (16, 1), (100, 7), ("prompt", 25)])
def test_pinned_blocks_are_never_ranked_and_the_budget_is_of_the_rest(
    protect: int | str, pinned: int, policy: str
) -> None:
    """Behind the pinned blocks all is as in a sequence that begins there."""
    prompt, before, asked = 395, pinned * 16, {"kv_budget": 0.2, "kv_policy": policy}
    one = make_state(prompt, **asked, kv_protect=protect)
    rest = make_state(max(1, prompt - before), **asked)
    assert one.pinned == pinned
    alike = [
        (seen - before, [[index - pinned for index in indices] for indices in evicted])
        for seen, evicted in run(one, 800)
    ]
    alone = run(rest, 800 - before)
    assert alike == [(seen, [list(indices) for indices in evicted]) for seen, evicted in alone]
    assert len(alike) > 10


ENDS: list[dict[str, object]] = [
    {"kv_budget": 0.2},
    {"kv_budget": 0.3, "kv_recent": 0.05, "kv_delay": 16},
    {"kv_budget": 0.3, "kv_recent": 1.0},
    {"kv_budget_tokens": 1, "kv_recent": 0.0},
    {"kv_budget": 0.2, "kv_policy": "window"},
    {"kv_budget": 0.2, "kv_policy": "key", "kv_evict_from": 700},
    {"kv_budget": 0.4, "kv_policy": "key", "kv_evict_from": 330},
    {"kv_budget": 0.1, "kv_policy": "key", "kv_prefill_tokens": 100},
    {"kv_budget": 0.9, "kv_prefill_tokens": 64, "kv_delay": 3},
]


@pytest.mark.parametrize("asked", ENDS, ids=str)
@pytest.mark.parametrize("prompt", [65, 70, 99, 200, 307, 640])
@pytest.mark.parametrize("block_size", [16, 32])
def test_the_prompts_end_stays_within_the_budget(
    asked: dict[str, object], prompt: int, block_size: int
) -> None:
    """Law 3, and what workers rely on: the heavy blocks are neighbours in the table without holes."""
    one = make_state(prompt, block_size, kv_protect="ends", **asked)
    prompt = min(prompt, int(str(asked.get("kv_evict_from", prompt))))
    kept = max(16, math.ceil(float(str(asked.get("kv_budget", 0))) * prompt))
    half = min(63, kept // 2, int(str(asked.get("kv_prefill_tokens", prompt))) // 2)
    assert one.pinned == 1 and len(one.end) == min(half, prompt - 1) // block_size
    assert not one.end or one.end.stop == math.ceil(prompt / block_size)
    live: set[int] = set()
    evicted = 0
    for seen in range(1200):
        live |= {(seen - 1) // block_size} if seen else set()
        due = one.evict(seen)
        if due is not None:
            ranked = {*due.heavy, *due.doomed}
            assert ranked <= live - {0, *one.end} and max(ranked) < seen // block_size
            assert {*due.fresh} <= ranked or not one.policy.moves_tokens
            live -= {*due.doomed}
            table = sorted(live)
            first = table.index(due.heavy[0]) if due.heavy else 0
            assert table[first : first + len(due.heavy)] == [*due.heavy]
            assert one.pinned_before(due.heavy) == max(1, first) * block_size
            evicted += 1
        assert {0, *one.end} & {*range(seen // block_size)} <= live
        if one._evict_from is not None and seen >= one._evict_from:
            share = math.ceil(float(str(asked.get("kv_budget", 0))) * (seen - block_size))
            assert len(live) <= 1 + math.ceil(max(16, share) / block_size) + 1
    assert evicted > 2


@pytest.mark.parametrize("asked", ENDS, ids=str)
def test_a_replay_with_a_protected_end_evicts_as_before(asked: dict[str, object]) -> None:
    one = make_state(307, kv_protect="ends", **asked)
    evicted = [(seen, due) for seen in range(900) if (due := one.evict(seen)) is not None]
    one.release()
    readable = one.readable_tokens(900)
    assert readable <= one.publishable_tokens(900)
    computed, again = readable, []
    while computed < 900:
        due = one.evict(computed)
        again += [(computed, due)] if due is not None else []
        computed += one.chunk_limit(computed, min(64, 900 - computed))
    assert again == [(seen, due) for seen, due in evicted if seen >= readable]


def test_a_first_eviction_behind_the_end_says_where_its_gap_is() -> None:
    one = make_state(100, kv_protect="ends", kv_budget_tokens=100, kv_recent=0.0, kv_evict_from=400)
    first = one.evict(400)
    assert first is not None and one.end == range(4, 7)
    assert first.fresh[:3] == (1, 2, 3) and first.fresh[3] == 7
    assert one.gap_in(first.fresh) == (3, 3) and min(first.heavy) > 7
    starts = Eviction("r", (), (), (), fresh_blocks=first.fresh, fresh_from=16, fresh_gap=(3, 3))
    assert starts.fresh_starts(16) == tuple(16 * index for index in first.fresh)
    assert one.pinned_before(first.heavy) == (1 + 3) * 16
    assert one.publishable_tokens(400) == 4 * 16, "what it does not write, up to the end"


def test_the_last_pinned_block_fills_up_before_the_first_eviction() -> None:
    """Of a whole prompt: the block in which the answer begins is pinned, and evicting waits for it."""
    for prompt in range(1, 70):
        one = make_state(prompt, kv_budget_tokens=1, kv_protect="prompt")
        assert one.pinned * 16 >= prompt
        (seen, evicted), *_ = run(one, 200)
        assert seen >= (one.pinned + 1) * 16
        assert min(evicted.heavy + evicted.doomed) == one.pinned


def test_what_may_be_read_from_the_cache() -> None:
    assert make_state(400, kv_budget=0.2).readable_tokens(399) == 0
    assert make_state(400, kv_budget=0.2, kv_protect=33).readable_tokens(399) == 48
    assert make_state(400, kv_budget=0.2, kv_protect=33).readable_tokens(32) == 32
    assert make_state(400, kv_budget=1.0).readable_tokens(399) == 399
    # Less than the prompt, that an eviction due right behind it is not skipped.
    assert make_state(400, kv_budget=0.2, kv_policy="window").readable_tokens(500) == 384
    # 400 tokens less 80.
    assert make_state(400, kv_budget=0.2, kv_policy="key").readable_tokens(500) == 320
    assert make_state(400, kv_budget=0.2, kv_policy="key").readable_tokens(200) == 200
    # Nobody knows yet: stock.
    elastic = make_state(400, kv_budget=0.2, kv_policy="key", kv_elastic=True)
    assert elastic.readable_tokens(500) == 500


SCORELESS: list[dict[str, object]] = [
    {},
    {"kv_delay": 37},
    {"kv_protect": 33},
    {"kv_protect": "prompt"},
    {"kv_protect": 20, "kv_recent": 1.0},
    {"kv_recent": 0.0, "kv_budget_tokens": 1},
    {"kv_prefill_tokens": 100},
    {"kv_prefill_tokens": 100, "kv_protect": 20, "kv_delay": 30},
    {"kv_evict_from": 500},
]


@pytest.mark.parametrize("asked", SCORELESS, ids=str)
@pytest.mark.parametrize("prompt", [10, 64, 300, 400])
@pytest.mark.parametrize("block_size", [16, 32])
def test_without_scores_what_the_first_eviction_frees_is_read_and_published(
    asked: dict[str, object], prompt: int, block_size: int
) -> None:
    """No more and no less, from the start; and whoever begins behind it evicts as whoever begins before."""
    asked = {
        "kv_policy": "key",
        **({} if "kv_budget_tokens" in asked else {"kv_budget": 0.2}),
        **asked,
    }
    one = make_state(prompt, block_size, **asked)
    expected = one.readable_tokens(10_000)
    assert one.publishable_tokens(10_000) == expected
    evicted = [(seen, due) for seen in range(900) if (due := one.evict(seen)) is not None]
    first_at, first = evicted[0]
    assert expected == (max(first.doomed) + 1) * block_size < first_at
    assert first.doomed == tuple(range(one.pinned, one.pinned + len(first.doomed)))
    assert one.publishable_tokens(10_000) == expected
    assert len(evicted) > 5
    assert set(one.private(first)) == {*first.heavy}
    for _, later in evicted[1:]:
        assert set(one.private(later)) == {*later.heavy, *later.doomed}
    one.release()
    assert one.publishable_tokens(10_000) == one.readable_tokens(10_000) == expected
    for begin in {0, one.pinned_tokens, expected}:
        again, computed, found = make_state(prompt, block_size, **asked), begin, []
        while computed < 900:
            due = again.evict(computed)
            found += [(computed, due)] if due is not None else []
            computed += again.chunk_limit(computed, min(64, 900 - computed))
        assert found == evicted


def test_the_report_counts_protected_and_cached_tokens() -> None:
    one = make_state(400, kv_budget=0.2, kv_protect=100)
    one.admitted(96)
    one.counts.num_computed_tokens, one.counts.num_tokens = 500, 501
    run(one, 500)
    one.release()
    one.admitted(112)
    report = one.report()
    assert (report["tokens_protected"], report["tokens_cached"]) == (112, 96)
    assert report["budget_tokens"] == 112 + math.ceil(0.2 * (500 - 112))
