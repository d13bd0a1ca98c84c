# SPDX-License-Identifier: Apache-2.0
"""What every step's plan has to be: evictions that commute, and block tables that say what they freed."""

import itertools
from collections.abc import Mapping, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.policy.policy import Policy


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


def check_table(eviction: Eviction, tables: Mapping[str, Sequence[KVCacheBlock]]) -> None:
    """What the request of an eviction has in its block table, once the step is planned."""
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
    if not eviction.places:
        assert len(eviction.holes) == len(eviction.doomed_blocks)
