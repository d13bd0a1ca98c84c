# SPDX-License-Identifier: Apache-2.0
"""Which first evictions workers may prepare, and how much of each in a step. Engine core; no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from h2o_vllm.blocks.eviction_state import EvictionState
from h2o_vllm.blocks.plan import Upcoming
from h2o_vllm.blocks.request_state import RequestState

__all__ = ["upcoming_evictions"]

STEPS = 16
"""Steps before a first eviction in which it is prepared; the default of ``kv_delay``."""


def upcoming_evictions(
    states: Mapping[str, RequestState],
    tables: Mapping[str, Sequence[Any]],
    scheduled: Mapping[str, int],
) -> tuple[Upcoming, ...]:
    """First evictions that come some steps after this one, of policies that look at keys or values.

    Args:
        states, tables: by request. Tables hold vLLM's blocks.
        scheduled: tokens that this step computes of each request; ``num_computed_tokens`` includes them.
    """
    found = []
    for request_id, tokens in scheduled.items():
        state = states.get(request_id)
        if not isinstance(state, EvictionState) or not (state.evicts and state.policy.reads_kv):
            continue
        ahead = state.upcoming(state.counts.num_computed_tokens - tokens, STEPS)
        if ahead is not None:
            fresh, step, steps = ahead
            blocks = tuple(tables[request_id][index].block_id for index in fresh)
            start = fresh.start * state.block_size
            found.append(Upcoming(request_id, state.policy.indices(), blocks, start, step, steps))
    return tuple(found)
