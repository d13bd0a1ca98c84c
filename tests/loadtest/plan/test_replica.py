# SPDX-License-Identifier: Apache-2.0
"""Laws of a simulated engine: everyone is served, blocks come home, and time is what the steps take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from loadtest.plan.replica import Job, PoolError, Replica
from tests.loadtest.plan.engines import Metronome, crowd, served, settings

BUDGET = {"kv_budget": 0.25}
ELASTIC = {"kv_budget": 0.25, "kv_elastic": True}


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize(
    ("ours", "fields"), [(False, {}), (True, {}), (True, BUDGET), (True, ELASTIC)]
)
def test_nobody_is_lost_and_every_block_comes_home(
    ours: bool, pipelined: bool, fields: dict[str, Any]
) -> None:
    replica, jobs = served(settings(ours=ours, pipelined=pipelined), crowd(12, fields))
    assert all(job.at < job.first < job.end for job in jobs)
    assert sum(step.tokens for step in replica.steps) == sum(job.output_tokens for job in jobs)
    assert replica.unfinished == replica.blocks_in_use == 0
    assert max(step.usage for step in replica.steps) > 0.9


def test_without_pressure_ours_schedules_as_vllm_does() -> None:
    stock, ours = (served(settings(ours=ours, blocks=1000), crowd(12)) for ours in (False, True))
    assert [(job.first, job.end) for job in stock[1]] == [(job.first, job.end) for job in ours[1]]
    assert stock[0].steps == ours[0].steps


@pytest.mark.parametrize("pipelined", [False, True])
def test_time_is_that_of_the_steps(pipelined: bool) -> None:
    time = Metronome()
    replica, _ = served(settings(ours=False, pipelined=pipelined), crowd(6), time)
    assert len(replica.steps) == len(time.works)
    assert all(step.seconds == 1.0 for step in replica.steps)
    assert all(later.end - sooner.end >= 1.0 for sooner, later in pairwise(replica.steps))


def test_an_idle_engine_waits_for_the_next_request() -> None:
    _, jobs = served(settings(ours=False), [Job(0, 5.0, 100, 3), Job(1, 50.5, 100, 3)])
    assert [(job.first, job.end) for job in jobs] == [(6.0, 8.0), (51.5, 53.5)]


def test_a_request_that_comes_during_a_step_is_in_the_next_one() -> None:
    _, jobs = served(settings(ours=False), [Job(0, 0.0, 100, 10), Job(1, 2.5, 20, 3)])
    assert jobs[1].first == 4.0


def test_a_pipelined_engine_has_decided_on_the_next_step_already() -> None:
    _, jobs = served(
        settings(ours=False, pipelined=True), [Job(0, 0.0, 100, 10), Job(1, 2.5, 20, 3)]
    )
    assert jobs[1].first == 5.0


def test_what_a_step_computes_is_counted() -> None:
    time = Metronome()
    served(settings(ours=False), [Job(0, 0.0, 200, 3)], time)
    first, second, *decodes = time.works
    # Chunks of 128 tokens: a query sees itself and all before it.
    assert (first.prompt_tokens, first.pairs, first.outputs) == (128, 128 * 129 // 2, 0)
    assert (second.prompt_tokens, second.outputs) == (72, 1)
    assert first.pairs + second.pairs == 200 * 201 // 2
    assert [(work.decodes, work.context, work.prompt_tokens) for work in decodes] == [
        (1, 201, 0), (1, 202, 0),
    ]  # fmt: skip


def test_after_an_eviction_a_decode_reads_what_was_kept() -> None:
    time = Metronome()
    served(settings(ours=True), [Job(0, 0.0, 128, 3, {**BUDGET, "kv_delay": 0})], time)
    prompt, decode, last = time.works
    assert prompt.scored_pairs == 128 * 129 // 2 and not prompt.pairs
    # A quarter of 128 tokens is two blocks, and up to one more is held.
    assert decode.ranked and not last.ranked and not decode.context
    assert 33 <= decode.scored_context <= 49 and last.scored_context == decode.scored_context + 1


def test_budgets_keep_vllm_from_preempting() -> None:
    preempted = {}
    lossless = {}
    for name, ours, fields in (
        ("vllm", False, {}),
        ("fixed", True, BUDGET),
        ("elastic", True, ELASTIC),
    ):
        _, jobs = served(settings(ours=ours, blocks=90), crowd(10, fields, output=150))
        preempted[name] = sum(job.preemptions for job in jobs)
        lossless[name] = sum(job.lossless for job in jobs)
    assert preempted["vllm"] > preempted["fixed"] == preempted["elastic"] == 0
    assert lossless["vllm"] == 10 and lossless["fixed"] == 0 < lossless["elastic"] < 10


def test_vllm_is_not_asked_for_budgets() -> None:
    _, jobs = served(settings(ours=False), crowd(3, BUDGET))
    assert all(job.lossless for job in jobs)


def test_a_pool_that_cannot_hold_a_request_is_refused() -> None:
    with pytest.raises(
        PoolError, match=r"the pool holds 496 tokens, less than --max-model-len 512"
    ):
        Replica(settings(ours=False, blocks=32), Metronome())


def test_of_one_traffic_a_larger_budget_never_holds_less() -> None:
    held = []
    for budget in (0.1, 0.25, 0.5, 1.0):
        replica, _ = served(settings(ours=True, blocks=1000), crowd(8, {"kv_budget": budget}))
        held.append(sum(step.usage for step in replica.steps))
    assert held == sorted(held) and len(set(held)) == 4
