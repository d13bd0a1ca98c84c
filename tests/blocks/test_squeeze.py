# SPDX-License-Identifier: Apache-2.0
"""Elastic requests without an engine: who yields, when evictions begin, what may be read and published."""

import pytest

from h2o_vllm.blocks.counts.eviction_state import EvictionState
from h2o_vllm.blocks.counts.squeeze import Victim, choose_victims
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve_for
from tests.blocks.test_eviction_state import Counts, make_state
from tests.served import COUNTED


def victim(name: str, gain: int, priority: int = 0, arrived: float = 0.0) -> Victim:
    state = make_state(400, kv_budget=0.2, kv_elastic=True)
    state.counts.arrival_time = arrived
    return Victim(name, state, gain, priority)


def names(victims: list[Victim]) -> list[str]:
    return [one.request_id for one in victims]


def test_who_gives_most_yields_first_and_the_youngest_of_equals() -> None:
    crowd = [victim("old", 5, arrived=1), victim("small", 2), victim("young", 5, arrived=2)]
    assert names(choose_victims(crowd, 1)) == ["young"]
    assert names(choose_victims(crowd, 6)) == ["young", "old"]
    assert names(choose_victims(crowd, 12)) == ["young", "old", "small"]


def test_nobody_yields_if_all_together_could_not_cover_the_need() -> None:
    assert choose_victims([victim("a", 5), victim("b", 2)], 8) == []
    assert choose_victims([], 1) == []


def test_the_least_important_yields_first_and_nobody_in_vain() -> None:
    crowd = [victim("vital", 9, 0), victim("low", 3, 2), victim("lower", 1, 5)]
    assert names(choose_victims(crowd, 4)) == ["lower", "low"]
    # The important one has to go in any case, and covers it all.
    assert names(choose_victims(crowd, 9)) == ["vital"]
    assert names(choose_victims(crowd, 12)) == ["low", "vital"]


def elastic(prompt: int, **asked: object) -> EvictionState:
    return make_state(prompt, kv_budget=0.2, kv_elastic=True, **asked)


def grown(state: EvictionState, tokens: int) -> EvictionState:
    """``state`` once ``tokens`` are computed."""
    counts = state.counts
    counts.num_computed_tokens, counts.num_tokens = tokens, tokens + 1
    return state


@pytest.mark.parametrize("policy", COUNTED)
def test_nothing_is_evicted_before_the_squeeze_and_all_that_is_due_with_it(policy: str) -> None:
    one = elastic(400, kv_policy=policy, kv_protect=0)
    assert one.squeezable
    assert [one.evict(seen) for seen in range(400, 600)] == [None] * 200
    assert one.squeezed_at is None
    grown(one, 600)
    expected = one.excess(600)
    assert expected is not None and one.holes == 0, "a look changes nothing"
    assert one.squeeze(600) == expected
    assert not one.squeezable and one.excess(600) is None, "a latch"
    assert one.holes == len(expected.doomed) == (600 - 120) // 16
    assert one.evict(600) is None, "once per step"
    grown(one, 601)
    assert one.squeezed_at == one.report()["squeezed_at"] == 600


@pytest.mark.parametrize("policy", ["h2o", "key", "window"])
def test_evict_from_replays_a_squeeze(policy: str) -> None:
    """The same evictions at the same counts, in small steps and in chunks, also after a preemption."""
    one = elastic(400, kv_policy=policy)
    wanted = [(555, one.squeeze(555))]
    wanted += [(seen, due) for seen in range(556, 900) if (due := one.evict(seen)) is not None]
    assert len(wanted) > 5
    replay = make_state(400, kv_budget=0.2, kv_policy=policy, kv_evict_from=555)
    found = [(seen, due) for seen in range(400, 900) if (due := replay.evict(seen)) is not None]
    assert found == wanted
    for again in (one, replay):
        again.release()
        computed, found = again.readable_tokens(554), []
        while computed < 900:
            due = again.evict(computed)
            found += [(computed, due)] if due is not None else []
            computed += again.chunk_limit(computed, min(100, 900 - computed))
        assert found == wanted


@pytest.mark.parametrize("policy", ["h2o", "key", "window"])
@pytest.mark.parametrize("asked", [16, 200, 399, 400])
def test_evict_from_inside_of_the_prompt_is_a_shorter_prompt(asked: int, policy: str) -> None:
    """The rest of the prompt is computed between the evictions of an answer."""
    one = make_state(400, kv_budget=0.2, kv_policy=policy, kv_evict_from=asked)
    short = make_state(asked, kv_budget=0.2, kv_policy=policy)
    assert one.evict(asked - 1) is None
    computed = asked
    while computed < 900:
        assert one.evict(computed) == short.evict(computed)
        assert one.params() == short.params()
        computed += one.chunk_limit(computed, min(100, 900 - computed))
    assert one.holes == short.holes > 20


def test_evict_from_behind_the_answer_leaves_a_request_to_stock_vllm() -> None:
    def evicts(evict_from: int) -> bool:
        asked = {"kv_budget": 0.2, "kv_evict_from": evict_from}
        return make_state(400, max_tokens=100, **asked).evicts

    assert evicts(498) and not evicts(499)


def test_a_delay_begins_behind_the_prompt() -> None:
    """As ``kv_evict_from`` does, but counted from there."""
    later = make_state(400, kv_budget=0.2, kv_delay=16)
    replay = make_state(400, kv_budget=0.2, kv_evict_from=416)
    for seen in range(400, 900):
        assert later.evict(seen) == replay.evict(seen)
        assert (later.holes > 0) == (seen >= 416)
    assert make_state(400, max_tokens=18, kv_budget=0.2, kv_delay=16).evicts
    assert not make_state(400, max_tokens=17, kv_budget=0.2, kv_delay=16).evicts


def test_a_short_answer_is_lossless_unless_somebody_asks_otherwise() -> None:
    """What a newcomer meets first: no answer of a sentence is given from what is left."""
    for max_tokens, evicts in ((1, False), (17, False), (18, True)):
        counts = Counts(400, max_tokens, num_tokens=401)
        budget = resolve_for(H2OConfig(kv_min_tokens=16), {"kv_budget": 0.2}, 400)
        assert EvictionState(counts, budget, 16, 8192).evicts is evicts
        asked = {"kv_budget": 0.2, "kv_delay": 0}
        at_once = resolve_for(H2OConfig(kv_min_tokens=16), asked, 400)
        assert EvictionState(counts, at_once, 16, 8192).evicts is (max_tokens > 1)


def test_nobody_is_squeezed_within_its_delay() -> None:
    one = elastic(400, kv_delay=16)
    assert grown(one, 415).excess(415) is None
    assert grown(one, 416).excess(416) is not None


def test_who_computes_known_tokens_cannot_be_squeezed() -> None:
    """Its prompt, or its answer again: those tokens came of KV that was whole."""
    one = elastic(400)
    grown(one, 600)
    assert one.excess(600) is not None and one.excess(599) is None
    fresh = elastic(400)
    assert grown(fresh, 399).excess(399) is None
    assert grown(fresh, 400).excess(400) is not None
    assert grown(make_state(400, kv_budget=0.2), 600).excess(600) is None, "not elastic"
    assert grown(elastic(400, kv_protect="prompt"), 410).excess(410) is None, "nothing in excess"


def test_an_answer_whose_last_token_was_under_way_is_lossless() -> None:
    """Asynchronous scheduling squeezes at 601 who turns out to end with token 601."""
    one = grown(elastic(400), 600)
    one.squeeze(601)
    assert one.squeezed_at is None
    grown(one, 601)
    assert one.squeezed_at is None
    grown(one, 602)
    assert one.squeezed_at == 601
