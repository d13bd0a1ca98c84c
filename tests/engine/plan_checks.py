# SPDX-License-Identifier: Apache-2.0
"""What every step's plan has to be: evictions that commute, and block tables that say what they freed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from h2o_vllm.blocks.plan import Eviction, StepPlan, Upcoming
from h2o_vllm.engine.core.scheduler import H2OScheduler
from h2o_vllm.policy.policy import Policy

__all__ = ["check_commuting", "check_known", "check_room", "check_table", "check_upcoming"]


def check_known(output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
    """A synchronous step computes no token that is not known yet."""
    for name in output.num_scheduled_tokens:
        drafts = output.scheduled_spec_decode_tokens.get(name, ())
        assert requests[name].num_computed_tokens <= requests[name].num_tokens + len(drafts)


def check_commuting(evictions: Sequence[Eviction]) -> None:
    """The law of :class:`h2o_vllm.blocks.plan.StepPlan`: which of a step's evictions commute."""
    assert len({eviction.request_id for eviction in evictions}) == len(evictions)
    # An eviction that moves no tokens reads none.
    moving = [eviction for eviction in evictions if eviction.moves]
    for one, other in itertools.combinations(moving, 2):
        written, read = {*one.heavy_blocks}, {*one.doomed_blocks}
        assert written.isdisjoint(other.doomed_blocks), "one reads what an earlier one writes"
        if not other.places:
            # Otherwise a segment settles into blocks that an earlier eviction freed: workers keep the order.
            touched = written | read
            assert touched.isdisjoint(other.heavy_blocks), "one writes what another has"
    for one, other in itertools.permutations(moving, 2):
        shared = {*one.doomed_blocks}.intersection(other.doomed_blocks)
        if shared:
            assert not Policy.of(one.ranks).needs_scores, "others may rescore what is ranked"
            assert shared <= {*one.fresh_blocks}, "others hold what an eviction has written"


def check_room(scheduler: H2OScheduler, output: SchedulerOutput) -> int:
    """If one came in, there is room for the floors of elastic requests, for as many steps as it has tokens.

    Not checked where tokens do not say how many blocks there are: blocks may have several owners, and other
    layers and drafts take some.

    Returns:
        Whether several elastic requests run beside each other, so that this was checked.
    """
    blocks, longest = scheduler.blocks, scheduler.blocks.longest_answer
    admitted = {one.req_id for one in output.scheduled_new_reqs}
    admitted |= output.scheduled_cached_reqs.resumed_req_ids
    drafted = scheduler.vllm_config.speculative_config is not None
    if not admitted or drafted or scheduler._beside or blocks.enable_caching:
        return 0
    crowd, room = [], blocks.block_pool.get_num_free_blocks()
    for request in scheduler.running:
        state = blocks._elastic.get(request.request_id)
        if state is not None:
            known, computed = request.num_tokens - 1, request.num_computed_tokens
            steps = max(0, -(-(known - computed) // scheduler.max_num_scheduled_tokens))
            crowd.append((state, max(known, computed) - steps))
            room += len(blocks.req_to_blocks[request.request_id]) - state.holes
    for ahead in range(min(scheduler.requests[name].num_tokens for name in admitted)):
        needed = 0
        for state, first in crowd:
            seen = first + ahead
            if state.schedule.earliest <= seen <= state.expected_last(longest):
                needed += -(-(seen + 1) // state.block_size) - state.schedule.freed(seen, seen)
        assert needed <= room, f"in {ahead} steps floors take {needed} blocks, and there are {room}"
    return len(crowd) > 1


def check_table(
    eviction: Eviction, tables: Mapping[str, Sequence[KVCacheBlock]], *, elsewhere: bool = False
) -> None:
    """What the request of an eviction has in its block table, once the step is planned.

    ``elsewhere``: another engine has ranked the prompt, and what it has doomed is not read here.
    """
    if eviction.request_id not in tables:
        assert eviction.places, "an eviction of a request that was preempted"
        return
    table = tables[eviction.request_id]
    live = {block.block_id for block in table if not block.is_null}
    assert set(eviction.heavy_blocks) <= live
    entries = [table[index].block_id for index in eviction.places]
    assert not entries or entries == [*eviction.heavy_blocks]
    # A doomed block may come straight back as one the next tokens need.
    new = {block.block_id for block in table[max(eviction.holes) + 1 :]}
    assert live & set(eviction.doomed_blocks) <= new
    assert not set(eviction.heavy_blocks) & set(eviction.doomed_blocks)
    assert all(table[index].is_null for index in eviction.holes)
    if not eviction.places and not elsewhere:
        assert len(eviction.holes) == len(eviction.doomed_blocks)


def check_upcoming(
    plan: StepPlan,
    tables: Mapping[str, Sequence[KVCacheBlock]],
    announced: MutableMapping[str, Upcoming],
) -> None:
    """A first eviction that was announced comes as it was, and ranks blocks that the request has held since.

    ``announced``: by request; of the steps before, then also of this one.
    """
    for eviction in plan.evictions:
        said = announced.pop(eviction.request_id, None)
        if said is not None:
            found = (eviction.fresh_blocks, eviction.ranks, eviction.fresh_from)
            assert (said.blocks, said.ranks, said.fresh_from) == found
            assert {*said.blocks} == {*eviction.heavy_blocks, *eviction.doomed_blocks}
    # Of what is preempted or has ended others may have the blocks.
    for gone in announced.keys() - tables.keys():
        del announced[gone]
    for one in plan.upcoming:
        said = announced.get(one.request_id)
        assert said is None or (said.blocks == one.blocks and said.step < one.step)
        assert 1 <= one.step <= one.steps
        live = {block.block_id for block in tables[one.request_id] if not block.is_null}
        assert set(one.blocks) <= live
        announced[one.request_id] = one
