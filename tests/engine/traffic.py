# SPDX-License-Identifier: Apache-2.0
"""The state machine of ``test_state_machine.py``: clients, the real scheduler and a real pool."""

import itertools
import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle as RequestIds
from hypothesis.stateful import (
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from vllm.v1.request import RequestStatus

from h2o_vllm.blocks.counts.budget import blocks_freed, budget_tokens
from h2o_vllm.blocks.counts.eviction_state import EvictionState
from h2o_vllm.blocks.counts.settling_state import SettlingState
from h2o_vllm.config.settings import MOST_DRAFTS
from tests.engine.scheduling import STATES, Rig
from tests.engine.traffic_fields import RIGS, bounds, budgets, elastic, protects

FAMILIES = tuple(range(1000 * n, 1000 * n + 200) for n in (1, 2))
"""Prompts are beginnings of these, so that many share blocks. With its answer each fits into the pool."""


class Traffic(RuleBasedStateMachine):
    """Clients, scheduler and pool; ``model_dir`` is set by the test."""

    model_dir: str
    steps = evictions = preemptions = both = pinned_hits = 0
    squeezes = crowds = bounded = cut = doomed_hits = meetings = drafted = accepted = exact = (
        parted
    ) = ends = 0
    """Of all runs together. ``pinned_hits``: admissions that read others' blocks, below their pin;
    ``doomed_hits``: behind it, what they will free; ``meetings``: pairs of one step that free the same;
    ``crowds``: of four or five elastic requests; ``bounded``: times that a request was seen in a prompt from
    which it had evicted; ``cut``: the same behind the ``kv_evict_from`` of a prompt; ``ends``: times that one
    with a protected end had; ``exact``: the same of exact ones that run; ``parted``: steps in which late
    queries begin; ``both``: preempted in the step that had already evicted from it, which chance hardly
    brings about: ``test_laws_blocks.py`` has a script for it."""
    live = RequestIds("live")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.rig: Any = None
        self.states: dict[str, EvictionState] = {}
        """Of the requests that were squeezed."""
        self.points: dict[str, int] = {}
        """Where."""

    @initialize(**RIGS)
    def start(
        self,
        batched_tokens: int,
        num_blocks: int,
        beside: Any,
        drafts: int,
        ahead: bool,
        exact: bool,
        stages: int,
        **options: Any,
    ) -> None:
        # The rest is refused at start-up.
        if exact:
            options["pipelined"], beside, ahead = False, (), False
            drafts = min(drafts or 4, MOST_DRAFTS)
        if options["pipelined"] or beside == (STATES,):
            drafts = 0
        drafts = min(drafts, batched_tokens - 2)
        ahead = ahead and bool(drafts) and not beside
        # As many more as other layers take of the longest request.
        more = min(22, 2 * batched_tokens // 16 + 5) * len(beside)
        self.rig = Rig(
            self.model_dir,
            num_blocks + more,
            max_num_batched_tokens=batched_tokens,
            beside=beside,
            drafts=drafts,
            ahead=ahead,
            exact=exact,
            stages=1 if drafts or beside else stages,
            ghost=True,
            max_num_seqs=8,
            **options,
        )
        if exact:
            # Whatever else is drawn: some examples never admit one of their own.
            self.add(FAMILIES[0][:100], {"kv_exact": True}, 60, 0)

    @rule(
        target=live,
        family=st.sampled_from(FAMILIES),
        length=st.one_of(st.integers(1, 200), st.integers(60, 200)),
        asked=budgets,
        max_tokens=st.integers(1, 150),
        priority=st.integers(0, 2),
    )
    def admit(self, family: range, length: int, asked: Any, max_tokens: int, priority: int) -> str:
        if self.rig.exact and family is FAMILIES[0]:
            # It keeps all its KV, into which its drafter writes.
            asked = {"kv_exact": True}
        return self.add(family[:length], asked, max_tokens, priority)

    @rule(
        target=live,
        family=st.sampled_from(FAMILIES),
        length=st.integers(120, 200),
        asked=bounds,
        priority=st.integers(0, 2),
    )
    def admit_bounded(self, family: range, length: int, asked: Any, priority: int) -> str:
        return self.add(family[:length], asked, 60, priority)

    @rule(
        target=live,
        crowd=st.lists(st.tuples(st.integers(90, 160), elastic), min_size=2, max_size=5),
        shared=st.sampled_from([0, 50]),
        priority=st.integers(0, 2),
        steps=st.integers(10, 40),
    )
    def admit_elastic(self, crowd: Any, shared: int, priority: int, steps: int) -> Any:
        """Several at once, which have little in common: the pool is too small for most of these crowds.

        Most are squeezed when they have answered for a while, and nothing has ended them before.
        """
        Traffic.crowds += len(crowd) > 3
        names = []
        for length, asked in crowd:
            first = 10_000 * (self.count + 1)
            own = range(first, first + length - min(shared, length))
            prompt = [*FAMILIES[0][: length - len(own)], *own]
            names.append(self.add(prompt, asked, 80, priority))
        self.go_on(steps)
        return multiple(*names)

    @rule(
        target=live,
        family=st.sampled_from(FAMILIES),
        lengths=st.tuples(st.integers(60, 200), st.integers(60, 200)),
        policy=st.sampled_from(["h2o", "key"]),
        protected=st.one_of(st.just(0), protects),
        steps=st.integers(0, 20),
    )
    def admit_two_turns(
        self, family: range, lengths: Any, policy: str, protected: Any, steps: int
    ) -> Any:
        """The second finds what the first one protects, or frees, if there is a cache and it was computed."""
        names = []
        for length in sorted(lengths):
            asked = {"kv_budget": 0.2, "kv_protect": protected, "kv_policy": policy}
            names.append(self.add(family[:length], asked, 40))
            self.go_on(steps)
        return multiple(*names)

    @rule(steps=st.integers(1, 40))
    def advance(self, steps: int) -> None:
        self.go_on(steps)

    def add(self, prompt: Any, asked: Any, max_tokens: int, priority: int = 0) -> str:
        """Queue a request; returns its name."""
        self.count += 1
        name = f"r{self.count}"
        self.rig.add(name, prompt, asked, max_tokens=max_tokens, priority=priority)
        return name

    def go_on(self, steps: int) -> None:
        """So many steps, each checked."""
        for _ in range(steps):
            ran, output = len(self.rig.scheduler.running), self.rig.step()
            Traffic.steps += 1
            answers = self.rig.blocks.settled.answers
            works = (
                ran or output.num_scheduled_tokens or (answers.any_retained and not answers._turns)
            ) or self.rig.store is not None
            assert works or not self.rig.scheduler.waiting, "all wait"
            self.check_hits(output.scheduled_new_reqs)
            self.check_meetings(output.h2o.evictions)
            Traffic.parted += bool(output.h2o.early_blocks)
            self.check_requests()

    @rule(request_id=consumes(live))
    def abort(self, request_id: str) -> None:
        self.rig.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @rule()
    def preempt_all_and_reset_the_prefix_cache(self) -> None:
        # As vLLM does: it asks for this between steps.
        self.rig.settle()
        while self.rig.store is not None and self.rig.transfers._jobs:
            # What is on its way holds blocks.
            self.go_on(1)
            self.rig.settle()
        before = [request.num_preemptions for request in self.rig.scheduler.requests.values()]
        self.rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        after = [request.num_preemptions for request in self.rig.scheduler.requests.values()]
        Traffic.preemptions += sum(after) - sum(before)

    @invariant()
    def books_balance(self) -> None:
        if self.rig is not None:
            self.rig.check_books()

    def check_hits(self, admitted: Any) -> None:
        """Law 6: a hit never passes the pin, nor without scores what the first eviction will free."""
        for started in admitted:
            state = self.rig.blocks.eviction_state(started.req_id)
            if not isinstance(state, EvictionState) or state.stock or not state.policy.moves_tokens:
                continue
            pinned, hit = state.pinned * self.rig.block_size, started.num_computed_tokens
            assert hit <= first_ranked(state) * self.rig.block_size
            Traffic.pinned_hits += 0 < hit <= pinned
            Traffic.doomed_hits += hit > pinned

    def check_meetings(self, evictions: Any) -> None:
        """How many rank blocks that others rank in the same step; that they may, the rig has checked."""
        for one, other in itertools.combinations(evictions, 2):
            Traffic.meetings += not one.ranked_blocks.isdisjoint(other.ranked_blocks)

    def check_requests(self) -> None:
        """Laws 3, 6 and 7 for everybody who is running."""
        blocks = self.rig.blocks
        for request in self.rig.scheduler.running:
            state = blocks.eviction_state(request.request_id)
            seen = request.num_computed_tokens
            if isinstance(state, SettlingState):
                self.check_settling(state, seen, blocks.req_to_blocks[request.request_id])
                continue
            assert isinstance(state, EvictionState)
            assert not (state.evicts and state.budget.exact)
            if not state.evicts:
                # Served as by stock vLLM: nothing may ever have become due, before its last token was.
                last = min(seen, state.prompt_tokens + state.counts.max_tokens - 2)
                exact = state.budget.exact
                owes = not exact and blocks_freed(state.budget, last, state.block_size)
                Traffic.exact += exact
                assert last < state.schedule.earliest or not owes
            live = self.rig.live_blocks(request.request_id)
            Traffic.cut += state.holes > 0 and state.context < seen < state.prompt_tokens
            if state.schedule.first is not None and seen <= state.context:
                assert live <= state.schedule.first // self.rig.block_size + self.rig.ahead
                Traffic.bounded += state.holes > 0
            if state.squeezable:
                assert not state.holes, "evicted from who was not squeezed"
            elif state.budget.elastic and state.evicts:
                self.check_latch(request.request_id, state)
            if not state.evicts or seen <= (state._begin or state.context):
                continue
            if state.squeezable:
                if not state.stock:
                    self.check_private(state, blocks.req_to_blocks[request.request_id])
                continue
            if seen > state._evict_from:
                # A draft is a token seen until it is rejected; its block stays for the next ones.
                allowed = budget_tokens(state.budget, self.rig.reached[request.request_id])
                assert live <= math.ceil(allowed / self.rig.block_size) + 1 + self.rig.ahead
            table = blocks.req_to_blocks[request.request_id]
            ends = [*table[: state.pinned], *table[state.end.start : state.end.stop]]
            assert not any(block.is_null for block in ends), "a protected block is gone"
            Traffic.ends += bool(state.end and state.holes)
            if state.policy.moves_tokens:
                self.check_private(state, table)
            elif hashed := [i for i, block in enumerate(table) if block.block_hash is not None]:
                # What was computed before the first eviction is everybody's, be it of the answer.
                assert (max(hashed) + 1) * self.rig.block_size <= first_eviction(state, seen)

    def check_private(self, state: EvictionState, table: Any) -> None:
        """Law 6: nobody scores what is still to be ranked, nor can find it.

        What is ranked by no scores of its own, and freed unwritten, anybody may have.
        """
        ranked = [block for block in table[first_ranked(state) :] if not block.is_null]
        assert all(block.ref_cnt == 1 for block in ranked), "others score what is ranked"
        assert all(block.block_hash is None for block in ranked), "others can find what is ranked"

    def check_settling(self, state: SettlingState, seen: int, table: Any) -> None:
        """Laws 3 and 6: which blocks a request holds, and at which table indices."""
        schedule, size = state.schedule, state.block_size
        settled, segment = state.settled, schedule.segment // size
        assert settled == (max(0, (seen - 1 - schedule.due(0)) // (segment * size)) * state.evicts)
        first, live = schedule.pin // size, [not block.is_null for block in table]
        kept = [True] * schedule.kept + [False] * (segment - schedule.kept)
        assert live[first : first + settled * segment] == kept * settled
        assert all(live[:first]) and all(live[first + settled * segment :])
        whole = self.rig.reached.get(state.counts.request_id, seen) - schedule.end(settled)
        assert whole <= schedule.window + segment * size or not state.evicts
        held = first + settled * schedule.kept + -(-max(whole, 0) // size) + 1
        assert sum(live) <= held + self.rig.ahead or not state.evicts
        assert settled + state.holes > 0 or not any(block.is_null for block in table)

    def check_latch(self, request_id: str, state: EvictionState) -> None:
        """Squeezed once, and for good."""
        at = state._evict_from
        assert at is not None and at >= state.prompt_tokens
        if request_id not in self.states:
            Traffic.squeezes += 1
            # Checked right after the step; a step in flight may have brought a token since.
            assert state.counts.num_tokens <= at + 2 + self.rig._drafts, (
                "known tokens came of whole KV"
            )
        self.states[request_id] = state
        assert self.points.setdefault(request_id, at) == at, "squeezed twice"

    def check_replays(self) -> None:
        """Law 5: evictions are those of a run alone that begins to evict at the same count."""
        for request_id, state in self.states.items():
            budget = replace(state.budget, elastic=False, evict_from=self.points[request_id])
            counts: Any = state.counts
            alone = EvictionState(counts, budget, state.block_size, 4096)
            seen = range(counts.num_tokens + 1)
            expected = {n: due.doomed for n in seen if (due := alone.evict(n)) is not None}
            for eviction in self.rig.evictions:
                if eviction.request_id == request_id:
                    assert expected.get(eviction.seen) == eviction.holes

    def teardown(self) -> None:
        if self.rig is None:
            return
        # Alone a request takes at most 164 steps: who goes round in circles takes longer than one after the
        # other. (In 1,700 runs, with up to 120 requests, the longest end took 142 steps for each.)
        Traffic.steps += self.rig.run(limit=200 * (len(self.rig.scheduler.requests) + 1))
        self.check_replays()
        Traffic.evictions += len(self.rig.evictions)
        Traffic.preemptions += self.rig.preemptions
        Traffic.drafted += self.rig.drafted
        Traffic.accepted += self.rig.accepted
        Traffic.both += self.rig.both
        assert not self.rig.blocks.states
        self.rig.scheduler.reset_prefix_cache()
        self.rig.blocks.check_integrity(idle=True)


def first_ranked(state: EvictionState) -> int:
    """The block at which those begin that nobody else may have, counted token by token."""
    if state.policy.needs_scores:
        return state.pinned
    freed = (state.schedule.freed(n, state._evict_from) for n in itertools.count(state._begin))
    first = state.pinned + next(filter(None, freed))
    return min(first, state.end.start) if state.end else first


def first_eviction(state: EvictionState, seen: int) -> int:
    """Tokens a request has computed when its first block goes; all of them if none has gone yet."""
    counts = range(state._begin, seen)
    return next((n for n in counts if state.schedule.freed(n, state._evict_from)), seen)
