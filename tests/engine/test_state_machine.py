# SPDX-License-Identifier: Apache-2.0
"""Laws 1 to 3 and 5 to 7 under any order of events: hypothesis drives the real scheduler on a real pool.

Workers are played on ghost memory, so that any token that comes of KV of others, or of none, shows.

``--long`` runs thousands of steps more, elsewhere every time. A failure
shrinks to a short script of rules, which then becomes a test of its own in ``test_laws_blocks.py``.
Bugs that are planted have to be found, else the machine would prove nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from vllm.v1.core.block_pool import BlockPool

from h2o_vllm.blocks.budget import blocks_freed
from h2o_vllm.blocks.eviction_state import EvictionState
from h2o_vllm.blocks.manager import H2OBlockManager
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.engine.core.scheduler import H2OScheduler
from tests.engine.traffic import Traffic


def test_any_order_of_events_keeps_the_laws(
    model_dir: str, long: bool, pytestconfig: pytest.Config
) -> None:
    Traffic.model_dir = model_dir
    unwanted = {Phase.shrink} if pytestconfig.getoption("--no-shrink") else set()
    run_state_machine_as_test(
        Traffic,
        settings=settings(
            max_examples=3000 if long else 30,
            stateful_step_count=60 if long else 30,
            deadline=None,
            derandomize=not long,
            phases=[phase for phase in Phase if phase not in unwanted],
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(
        f"{Traffic.steps} steps, {Traffic.evictions} evictions, {Traffic.preemptions} preemptions, "
        f"{Traffic.both} of both at once, {Traffic.pinned_hits} hits below a pin, "
        f"{Traffic.doomed_hits} behind it, {Traffic.meetings} pairs that free the same, "
        f"{Traffic.squeezes} squeezes, {Traffic.crowds} large crowds, {Traffic.bounded} times in a bounded "
        f"prompt, {Traffic.drafted} drafts, {Traffic.accepted} of them accepted, "
        f"{Traffic.exact} times an exact request ran"
    )
    # Far below what was seen: which events are drawn changes with every number in the code that is loaded, of
    # which hypothesis makes use. Hits and meetings have scripts of their own: ``test_doomed_hits_tokens.py``,
    # ``test_eviction_order.py``, ``test_ghost.py``.
    assert Traffic.steps > 4000
    assert Traffic.evictions > 500
    assert Traffic.preemptions > 20
    assert Traffic.squeezes > 10
    assert Traffic.crowds > 5
    assert Traffic.bounded > 20
    assert Traffic.drafted > 1000 and Traffic.accepted > 500
    assert Traffic.exact > 10


def holes_survive_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    release = EvictionState.release

    def first_only(self: EvictionState) -> None:
        if not hasattr(self, "holes"):
            release(self)

    monkeypatch.setattr(EvictionState, "release", first_only)


def everything_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that evictions write go into the prefix cache."""
    monkeypatch.setattr(EvictionState, "publishable_tokens", lambda self, computed: computed)


def blocks_are_published_before_they_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the first eviction will free: not written, but ranked, while a reader adds to them."""
    publishable = EvictionState.publishable_tokens

    def early(self: EvictionState, computed: int) -> int:
        first = blocks_freed(self.budget, self.prompt_tokens, self.block_size) + self.pinned
        return max(publishable(self, computed), min(computed, first * self.block_size))

    monkeypatch.setattr(EvictionState, "publishable_tokens", early)


def hits_pass_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who protects something reads a block more."""
    readable = EvictionState.readable_tokens

    def more(self: EvictionState, known: int) -> int:
        tokens = readable(self, known)
        return min(known, tokens + 16 * (tokens > 0))

    monkeypatch.setattr(EvictionState, "readable_tokens", more)


def hits_pass_what_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who needs no scores reads, and publishes, a block more: one that its first eviction writes."""
    readable = EvictionState._readable.fget
    assert readable is not None

    def more(self: EvictionState) -> int:
        tokens: int = readable(self)
        return tokens + (self.policy.moves_tokens and not self.policy.needs_scores)

    monkeypatch.setattr(EvictionState, "_readable", property(more))


def eviction_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets are kept, but three blocks too late."""
    evict = EvictionState.evict
    monkeypatch.setattr(EvictionState, "evict", lambda self, computed: evict(self, computed - 48))


def block_is_freed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doomed blocks stay in the table, and are freed again with the request."""

    def freeing(self: H2OBlockManager, request_id: str, *args: Any, **kwargs: Any) -> None:
        table = list(self.req_to_blocks[request_id])
        remove(self, request_id, *args, **kwargs)
        self.req_to_blocks[request_id][: len(table)] = table

    remove = H2OBlockManager.remove_skipped_blocks
    monkeypatch.setattr(H2OBlockManager, "remove_skipped_blocks", freeing)


def block_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One doomed block never returns to the pool."""

    def losing(self: H2OBlockManager, request_id: str, *args: Any, **kwargs: Any) -> None:
        before = len(self._evictions)
        remove(self, request_id, *args, **kwargs)
        if len(self._evictions) > before:
            doomed = self._evictions[request_id].doomed_blocks[0]
            self.block_pool.touch([self.block_pool.blocks[doomed]])

    remove = H2OBlockManager.remove_skipped_blocks
    monkeypatch.setattr(H2OBlockManager, "remove_skipped_blocks", losing)


def squeezed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was squeezed can be squeezed again, later: its floor begins to count anew."""

    def always(self: EvictionState, computed: int) -> Any:
        if self._evict_from is not None and computed > self._evict_from + 8:
            self._evict_from = None
        return excess(self, computed)

    excess = EvictionState.excess
    monkeypatch.setattr(EvictionState, "excess", always)


def who_was_squeezed_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds its blocks and computes nothing: the crowd never ends."""

    def limit(self: EvictionState, computed: int, num_tokens: int) -> int:
        squeezed = self.budget.elastic and self.holes > 0
        return 0 if squeezed else chunk_limit(self, computed, num_tokens)

    chunk_limit = EvictionState.chunk_limit
    monkeypatch.setattr(EvictionState, "chunk_limit", limit)


def squeezed_blocks_stay_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that evictions write, or that are computed behind the first one, can still be found."""
    monkeypatch.setattr(BlockPool, "evict_blocks", lambda self, block_ids: None)


def rejected_drafts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are told that all drafts were accepted, and add what they give."""

    def planned(self: H2OScheduler, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        all_of_them = dict.fromkeys(output.h2o.confirmed, 10_000)
        output.h2o = replace(output.h2o, confirmed=all_of_them)
        return output

    schedule = H2OScheduler.schedule
    monkeypatch.setattr(H2OScheduler, "schedule", planned)


def accepted_drafts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they give is added to no score."""

    def planned(self: H2OScheduler, *args: Any, **kwargs: Any) -> Any:
        self._drafted = ()
        return schedule(self, *args, **kwargs)

    schedule = H2OScheduler.schedule
    monkeypatch.setattr(H2OScheduler, "schedule", planned)


def drafts_cross_an_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when they are confirmed, and not where it is due."""

    def limit(self: EvictionState, computed: int, num_tokens: int) -> int:
        drafting = computed >= self.counts.num_tokens - 1
        return num_tokens if drafting else chunk_limit(self, computed, num_tokens)

    chunk_limit = EvictionState.chunk_limit
    monkeypatch.setattr(EvictionState, "chunk_limit", limit)


def drafts_cross_what_a_squeeze_makes_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of a request that is squeezed in the step in which it drafts."""

    def limit(self: EvictionState, computed: int, num_tokens: int) -> int:
        return num_tokens if self.squeezable else chunk_limit(self, computed, num_tokens)

    chunk_limit = EvictionState.chunk_limit
    monkeypatch.setattr(EvictionState, "chunk_limit", limit)


def block_of_drafts_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that was taken for drafts alone leaves the table, and never returns to the pool."""

    def allocating(self: H2OBlockManager, request_id: str, num_tokens: int, *args: int) -> Any:
        blocks = allocate(self, request_id, num_tokens, *args)
        state = self.eviction_state(request_id)
        if state is not None and blocks:
            table, known = self.req_to_blocks[request_id], state.counts.num_tokens
            if (len(table) - 1) * self.block_size >= known:
                table.pop()
        return blocks

    allocate = H2OBlockManager.allocate_new_blocks
    monkeypatch.setattr(H2OBlockManager, "allocate_new_blocks", allocating)


def exact_requests_evict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What says how much drafts attend to counts as a budget."""
    monkeypatch.setattr(RequestBudget, "evicts", property(lambda self: self.fraction < 1))


@pytest.mark.parametrize(
    "plant",
    [
        # Found in seconds or in minutes; law 13 has tests of its own.
        pytest.param(exact_requests_evict, marks=pytest.mark.long),
        rejected_drafts_stay,
        accepted_drafts_are_forgotten,
        drafts_cross_an_eviction,
        # Some draws find it in seconds, others in minutes; `test_drafts.py` has the case by itself.
        pytest.param(drafts_cross_what_a_squeeze_makes_due, marks=pytest.mark.long),
        block_of_drafts_leaks,
        pytest.param(squeezed_twice, marks=pytest.mark.slow),
        pytest.param(who_was_squeezed_stands_still, marks=pytest.mark.slow),
        pytest.param(squeezed_blocks_stay_published, marks=pytest.mark.slow),
        pytest.param(holes_survive_a_preemption, marks=pytest.mark.slow),
        everything_is_published,
        blocks_are_published_before_they_are_ranked,
        hits_pass_the_pin,
        hits_pass_what_is_freed,
        eviction_comes_late,
        block_is_freed_twice,
        block_is_lost,
    ],
)
def test_planted_bugs_are_found(
    model_dir: str, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    Traffic.model_dir = model_dir
    with pytest.raises((AssertionError, LookupError)):
        run_state_machine_as_test(
            Traffic,
            settings=settings(
                max_examples=600,
                stateful_step_count=30,
                deadline=None,
                derandomize=True,
                # Found is enough: no shrinking.
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
