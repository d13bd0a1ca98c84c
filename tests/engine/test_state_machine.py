# SPDX-License-Identifier: Apache-2.0
"""Laws 1 to 3 and 5 to 7 under any order of events: hypothesis drives the real scheduler on a real pool.

Workers are played on ghost memory, so that any token that comes of KV of others, or of none, shows.

``--long`` runs thousands of steps more, elsewhere every time. A failure
shrinks to a short script of rules, which then becomes a test of its own in ``test_laws_blocks.py``.
Bugs that are planted have to be found, else the machine would prove nothing: one of each kind here.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, seed

from h2o_vllm.blocks.counts.eviction_state import EvictionState
from h2o_vllm.blocks.manager.block_manager import H2OBlockManager
from h2o_vllm.engine.core.scheduler import H2OScheduler
from tests.engine.traffic import Traffic
from tests.engine.traffic_fields import run_machine

OFTEN = {
    "steps": 4000, "evictions": 500, "preemptions": 20, "squeezes": 10, "crowds": 5, "bounded": 20, "cut": 10,
    "drafted": 1000, "accepted": 500, "exact": 10,
    "parted": 50, "ends": 20,
}  # fmt: skip
"""How often each event has to be seen, far below the usual. Hits and meetings have scripts of their own:
``test_doomed_hits_tokens.py``, ``test_eviction_order.py``, ``test_ghost.py``."""

MOST_SEARCHES = 4
"""Which events a search draws changes with every number in the code that is loaded, of which hypothesis makes
use; few searches draw some event hardly ever, and another one follows them."""


def rare() -> dict[str, int]:
    """The events that were seen less often than they have to be, and how often."""
    counts = {name: getattr(Traffic, name) for name in OFTEN}
    return {name: count for name, count in counts.items() if count <= OFTEN[name]}


def test_any_order_of_events_keeps_the_laws(
    model_dir: str, long: bool, pytestconfig: pytest.Config
) -> None:
    Traffic.model_dir = model_dir
    for start in range(1 if long else MOST_SEARCHES):
        if not long:
            seed(start)(Traffic)
        run_machine(Traffic, 3000 if long else 30, pytestconfig, database=None)
        if not rare():
            break
    print(
        f"{Traffic.steps} steps, {Traffic.evictions} evictions, {Traffic.preemptions} preemptions, "
        f"{Traffic.both} of both at once, {Traffic.pinned_hits} hits below a pin, "
        f"{Traffic.doomed_hits} behind it, {Traffic.meetings} pairs that free the same, "
        f"{Traffic.squeezes} squeezes, {Traffic.crowds} large crowds, {Traffic.bounded} times in a bounded "
        f"prompt, {Traffic.cut} in a cut one, {Traffic.drafted} drafts, {Traffic.accepted} of them accepted, "
        f"{Traffic.exact} times an exact request ran, {Traffic.parted} steps with first late queries, "
        f"{Traffic.ends} times one without its middle"
    )
    assert not rare()


def everything_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that evictions write go into the prefix cache."""
    monkeypatch.setattr(EvictionState, "publishable_tokens", lambda self, computed: computed)


def eviction_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets are kept, but three blocks too late."""
    evict = EvictionState.evict
    monkeypatch.setattr(EvictionState, "evict", lambda self, computed: evict(self, computed - 48))


def block_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One doomed block never returns to the pool."""

    def losing(self: H2OBlockManager, request_id: str, *args: Any, **kwargs: Any) -> None:
        before = len(self.evictions)
        remove(self, request_id, *args, **kwargs)
        if len(self.evictions) > before:
            doomed = self.evictions[request_id].doomed_blocks[0]
            self.block_pool.touch([self.block_pool.blocks[doomed]])

    remove = H2OBlockManager.remove_skipped_blocks
    monkeypatch.setattr(H2OBlockManager, "remove_skipped_blocks", losing)


def rejected_drafts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are told that all drafts were accepted, and add what they give."""

    def planned(self: H2OScheduler, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        all_of_them = dict.fromkeys(output.h2o.confirmed, 10_000)
        output.h2o = replace(output.h2o, confirmed=all_of_them)
        return output

    schedule = H2OScheduler.schedule
    monkeypatch.setattr(H2OScheduler, "schedule", planned)


def early_parts_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are not told that late queries begin."""
    monkeypatch.setattr(EvictionState, "early_from", lambda self, computed: None)


def late_queries_join_early_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of an unbounded prompt go on to its end."""
    limit = EvictionState.chunk_limit

    def unlimited(self: EvictionState, computed: int, num_tokens: int) -> int:
        within = computed + num_tokens <= self.prompt_tokens and not self.budget.prefill
        return num_tokens if within else limit(self, computed, num_tokens)

    monkeypatch.setattr(EvictionState, "chunk_limit", unlimited)


@pytest.mark.parametrize(
    "plant",
    [
        everything_is_published, eviction_comes_late, block_is_lost, rejected_drafts_stay,
        early_parts_are_lost, late_queries_join_early_ones,
    ],
)  # fmt: skip
def test_planted_bugs_are_found(
    model_dir: str, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    Traffic.model_dir = model_dir
    with pytest.raises((AssertionError, LookupError)):
        # Found is enough: no shrinking.
        run_machine(Traffic, 600, derandomize=True, phases=[Phase.generate])
