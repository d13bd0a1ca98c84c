# SPDX-License-Identifier: Apache-2.0
"""When blocks are given back: the schedule against a request that is played token by token."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from h2o_vllm.blocks.counts.budget import blocks_freed
from h2o_vllm.blocks.counts.schedule import EvictionSchedule
from h2o_vllm.blocks.counts.settling import default_blocks
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.errors import BudgetError
from tests.published import PUBLISHED

BLOCK = 16


def schedule(prompt: int, block_size: int = BLOCK, **asked: object) -> EvictionSchedule:
    budget = resolve_for(H2OConfig(kv_min_tokens=16, **PUBLISHED), asked, prompt)
    return EvictionSchedule.of(budget, block_size, prompt)


schedules = st.builds(
    schedule,
    prompt=st.integers(1, 900),
    block_size=st.sampled_from([4, 16]),
    kv_budget=st.sampled_from([0.1, 0.3, 1.0]),
    kv_protect=st.integers(0, 100),
    kv_delay=st.integers(0, 40),
    kv_recent=st.floats(0, 1),
    kv_prefill_tokens=st.one_of(st.just(0), st.integers(1, 400)),
    kv_evict_from=st.one_of(st.none(), st.integers(1, 1000)),
)


def test_prompt_within_its_bound_is_left_alone() -> None:
    for prompt in (1, 256):
        one = schedule(prompt, kv_budget=0.2, kv_prefill_tokens=256)
        assert one.first is None
        assert not any(one.freed(seen, one.earliest) for seen in range(prompt))


def test_longer_prompt_gives_back_a_quarter_at_a_time() -> None:
    one = schedule(600, kv_budget=1.0, kv_prefill_tokens=256)
    assert [one.freed(seen, one.earliest) for seen in (255, 256, 319, 320, 599)] == [0, 4, 4, 8, 24]
    # The budget of 1 takes nothing, and nothing comes back.
    assert [one.freed(seen, one.earliest) for seen in (600, 5000)] == [24, 24]


def test_budget_takes_the_rest_behind_the_prompt() -> None:
    one = schedule(600, kv_budget=0.2, kv_prefill_tokens=256)
    assert one.freed(599, one.earliest) == 24
    assert one.freed(600, one.earliest) == (600 - 120) // BLOCK == 30


def test_bound_is_rounded_and_has_room_for_the_floor() -> None:
    def bound(tokens: int, **asked: object) -> int:
        return schedule(4000, kv_prefill_tokens=tokens, **asked).budget.prefill

    assert [bound(tokens) for tokens in (1, 64, 79, 80, 1000)] == [64, 64, 64, 80, 992]


LATE = {"kv_budget": 0.1, "kv_delay": 10, "kv_recent": 0.0}


@given(schedules, st.integers(1, 200))
@example(schedule(55, 4, **LATE, kv_prefill_tokens=1), 2).via("ends before its budget rules")
def test_played_request_never_holds_more_than_its_peak(one: EvictionSchedule, answer: int) -> None:
    """Live tokens right before each is computed, and the first eviction after each: brute force."""
    size, total = one.block_size, one.prompt_tokens + answer - 1
    held, freed, begin = 0, 0, one.earliest
    bound = int(one.budget.protect) + one.budget.prefill
    for seen in range(total):
        now = one.freed(seen, begin)
        assert now >= freed, "what is given back does not come back"
        if now > freed:
            first = next((n for n in range(seen) if one.freed(n, begin) == freed), 0)
            assert one.next_due(first, begin, total) == seen
        freed = now
        live = seen + 1 - freed * size
        held = max(held, live)
        if one.first is not None and seen < one.context:
            assert live <= bound
    peak = one.peak_tokens(total, begin)
    assert held <= peak <= held + 2 * size
    assert one.can_evict(total - 1) == (freed > 0)
    assert one.next_due(total, begin, total) is None
    if one.first is None and one.context == one.prompt_tokens:
        assert one.reserved_tokens(total) == 0
    elif one.first is None:
        assert one.context <= one.reserved_tokens(total) <= one.peak_tokens(total, one.earliest)
    else:
        assert one.first <= one.reserved_tokens(total) <= one.peak_tokens(total, one.earliest)


@given(schedules, st.integers(1, 1000))
def test_recent_window_moves_forward_inside_and_behind_a_prompt(
    one: EvictionSchedule, seen: int
) -> None:
    inside = seen < one.context
    later = seen + 1
    assert one.recent_from(seen) * one.block_size <= seen
    if inside == (later < one.context):
        assert one.recent_from(seen) <= one.recent_from(later)


@given(schedules, st.integers(0, 1000))
def test_without_a_bound_the_budget_alone_decides(one: EvictionSchedule, seen: int) -> None:
    if one.budget.prefill == 0:
        expected = blocks_freed(one.budget, seen, one.block_size) if seen >= one.earliest else 0
        assert one.freed(seen, one.earliest) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 64),
        # A prompt is held whole until it is computed.
        ({"kv_budget": 0.2}, 64),
        ({"kv_budget": 0.2, "kv_prefill_tokens": 256}, 16),
        # What an answer may come to hold.
        ({"kv_prefill_tokens": 256}, 64),
        ({"kv_budget": 0.5, "kv_prefill_tokens": 256}, 33),
        ({"kv_budget_tokens": 64, "kv_prefill_tokens": 128, "kv_protect": 32}, 10),
        ({"kv_budget": 0.2, "kv_prefill_tokens": 256, "kv_protect": "prompt"}, 64),
        # The longest prompt that is short.
        ({"kv_budget": 0.2, "kv_prefill_tokens": 256, "kv_protect": "ends"}, 17),
    ],
)
def test_pool_has_to_hold_any_request_that_leaves_its_budget_to_the_server(
    options: dict[str, object], expected: int
) -> None:
    config = H2OConfig(kv_min_tokens=16, **{**PUBLISHED, **options})
    found = default_blocks(config, BLOCK, 1024)
    assert found == expected
    for prompt in range(1, 1024):
        one = EvictionSchedule.of(resolve_for(config, None, prompt), BLOCK, prompt)
        assert one.needed_blocks(1024, 1024) <= found


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    one = schedule(700, kv_budget=0.2, kv_prefill_tokens=256)
    one.check_fits(16, 20, 1024)
    with pytest.raises(
        BudgetError, match=r"at most 240 .* prompt of 700 .* up to 20 may hold 256"
    ) as caught:
        one.check_fits(15, 20, 1024)
    assert caught.value.parameter == "kv_prefill_tokens"
    whole = schedule(700, kv_budget=1.0)
    with pytest.raises(BudgetError, match=r"up to 324 may hold 1024"):
        whole.check_fits(63, None, 1024)
    whole.check_fits(64, None, 1024)
    # A drafter's slots after the last step, up to the model's length.
    whole.check_fits(64, None, 1024, ahead=3)
    one.check_fits(17, 20, 1024, ahead=3)
    with pytest.raises(BudgetError):
        one.check_fits(16, 20, 1024, ahead=3)


def test_rounding_twice_is_rounding_once() -> None:
    budget = resolve_for(H2OConfig(), {"kv_protect": 33, "kv_prefill_tokens": 500}, 900)
    once = EvictionSchedule.of(budget, BLOCK, 900).budget
    assert isinstance(once, RequestBudget)
    assert EvictionSchedule.of(once, BLOCK, 900).budget == once
    assert math.ceil(33 / BLOCK) * BLOCK == once.protect
