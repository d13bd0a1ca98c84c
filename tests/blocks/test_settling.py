# SPDX-License-Identifier: Apache-2.0
"""When segments settle, and how many tokens are held: closed forms against loops over single tokens."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_vllm.blocks.counts.settling import (
    SettlingSchedule,
    default_blocks,
    least_window,
    schedule_of,
)
from h2o_vllm.blocks.counts.settling_state import SettlingState
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.errors import BudgetError

CONFIG = H2OConfig(kv_min_tokens=16, kv_policy="key")

schedules = st.builds(
    lambda block, **asked: made(block, 600, **asked),
    st.sampled_from([4, 16, 32]),
    kv_budget=st.sampled_from([0.05, 0.2, 0.5, 0.75, 0.99]),
    kv_settle_tokens=st.integers(1, 300),
    kv_protect=st.integers(0, 70),
)


def made(block: int, prompt: int, **asked: Any) -> SettlingSchedule:
    schedule = schedule_of(resolve_for(CONFIG, asked, prompt), block, prompt)
    assert isinstance(schedule, SettlingSchedule)
    return schedule


class Loop:
    """Counts whole and settled blocks token by token."""

    def __init__(self, one: SettlingSchedule) -> None:
        self.size, self.pin, self.window = one.block_size, one.pin, one.window
        self.share = Fraction(str(one.budget.fraction))
        self.seen = self.whole_from = self.settled = self.blocks_of_settled = self.peak = 0
        self.whole_from = one.pin

    def compute(self) -> None:
        """Settle the segment that is due, if any, then compute one token."""
        segment = self.window // 4
        if self.seen - self.whole_from == segment + self.window:
            kept = math.ceil(self.share * segment / self.size)
            if kept < segment // self.size:
                self.peak = max(self.peak, self.held + kept * self.size)
            self.whole_from += segment
            self.settled += 1
            self.blocks_of_settled += kept
        self.seen += 1
        self.peak = max(self.peak, self.held)

    @property
    def held(self) -> int:
        whole = self.seen - self.settled * (self.window // 4)
        return whole + self.blocks_of_settled * self.size


@given(one=schedules)
def test_counts_are_those_of_a_loop(one: SettlingSchedule) -> None:
    loop = Loop(one)
    for seen in range(700):
        assert one.peak_tokens(max(1, seen)) == max(1, loop.peak)
        assert one.settled(max(0, seen - 1)) == loop.settled
        loop.compute()
        assert one.held_tokens(seen) == loop.held - 1
        assert one.can_evict(seen) == (loop.held < loop.seen)


@given(one=schedules, chunks=st.lists(st.integers(1, 90), min_size=1))
def test_chunks_end_where_a_segment_settles(one: SettlingSchedule, chunks: list[int]) -> None:
    """With any chunks, no two segments are due at once, and a start after a hit gives the same counts."""
    state = started(one)
    seen = 0
    for chunk in chunks * 20:
        if seen > 500:
            break
        number = state.due(seen)
        if number is not None:
            assert seen == one.due(number)
            state.resume(seen)
        assert not state.evicts or state.settled == one.settled(seen)
        again = started(one)
        again.resume(seen)
        assert (again.settled, again.holes) == (state.settled, state.holes) or not state.evicts
        seen += state.chunk_limit(seen, chunk)


class Counts:
    num_prompt_tokens, max_tokens, num_computed_tokens, num_tokens = 600, 100, 0, 601
    priority, arrival_time, block_hashes = 0, 0.0, ()

    def is_finished(self) -> bool:
        return False


def started(one: SettlingSchedule) -> SettlingState:
    return SettlingState(Counts(), one.budget, one.block_size, 4096)


def test_a_lineage_names_all_that_what_settles_depends_on() -> None:
    one = made(16, 600, kv_budget=0.3, kv_settle_tokens=256)
    same = made(16, 900, kv_budget=0.31, kv_settle_tokens=250, kv_delay=7, kv_recent=0.9)
    assert one.kept == same.kept and one.lineage() == same.lineage()
    budget = one.budget
    others = [
        replace(one, budget=replace(budget, protect=16)),
        replace(one, budget=replace(budget, settle=512)),
        replace(one, budget=replace(budget, fraction=0.6)),
        replace(one, budget=resolve_for(CONFIG, {"kv_budget": 0.3, "kv_policy": "random",
                                                 "kv_settle_tokens": 256, "kv_protect": 0}, 600)),
        replace(one, block_size=32),
    ]  # fmt: skip
    lineages = {each.lineage() for each in (one, *others)}
    assert len(lineages) == len(others) + 1
    assert all(len(each) == 32 for each in lineages)


def test_a_window_is_four_segments_of_whole_blocks_and_no_less_than_a_budget_may_be() -> None:
    assert made(16, 600, kv_budget=0.3, kv_settle_tokens=100).window == 128
    assert made(16, 600, kv_budget=0.3, kv_settle_tokens=128).window == 128
    least = schedule_of(
        resolve_for(H2OConfig(kv_policy="key"), {"kv_budget": 0.3, "kv_settle_tokens": 1}, 600),
        16,
        600,
    )
    assert least.bound == 128


def test_a_pool_that_is_too_small_is_refused_with_the_numbers() -> None:
    one = made(16, 600, kv_budget=0.25, kv_settle_tokens=256)
    needed = one.needed_blocks(100, 4096)
    one.check_fits(needed, 100, 4096)
    with pytest.raises(BudgetError, match="kv_settle_tokens must be such that at most") as caught:
        one.check_fits(needed - 1, 100, 4096)
    assert caught.value.parameter == "kv_settle_tokens"


@given(
    st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.51, 0.75, 0.9, 0.95, 0.99]),
    st.sampled_from([16, 32, 128]),
    st.integers(0, 4000),
)
def test_a_segment_has_enough_blocks_for_its_budget_or_is_refused(
    fraction: float, block: int, more: int
) -> None:
    """What stays is less than all, and at most twice the budget; the message has the least window."""
    least = least_window(fraction, block)
    one = made(block, 600, kv_budget=fraction, kv_settle_tokens=least + more)
    one.check_fits(10**6, 100, 10**5)
    blocks = one.segment // block
    assert one.kept < blocks and one.kept <= 2 * fraction * blocks + 1e-9
    if least > CONFIG.kv_min_tokens:
        below = made(block, 600, kv_budget=fraction, kv_settle_tokens=least - 1)
        with pytest.raises(BudgetError, match=rf"for kv_budget {fraction:g}; least: {least}, got"):
            below.check_fits(10**6, 100, 10**5)


def test_a_server_whose_default_settles_starts_with_less_than_its_length() -> None:
    config = H2OConfig(kv_budget=0.25, kv_policy="key", kv_settle_tokens=1024)
    found = default_blocks(config, 16, 32768)
    assert found == made(16, 1, kv_budget=0.25, kv_settle_tokens=1024).needed_blocks(32768, 32768)
    assert found * 16 < 10_000
