# SPDX-License-Identifier: Apache-2.0
"""Policies that repeat the prompt where blocks or seats are short: preemptions, crowds and squeezes."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.repeat_cases import ASKED, PROMPT, readers, report
from tests.engine.scheduling import Rig


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_a_preempted_prompt_is_repeated_again(model_dir: str, pipelined: bool) -> None:
    """At any time: the same evictions, for the price of what was computed before, up to twice as much."""
    alone = Rig(model_dir, 60, kv_min_tokens=16)
    alone.add("a", PROMPT, ASKED, max_tokens=20)
    steps = alone.run()
    expected = [(eviction.seen, eviction.holes) for eviction in alone.evictions]
    price = report(alone, "a")["tokens_repeated"]
    prices = set()
    rig = Rig(model_dir, 60, kv_min_tokens=16, pipelined=pipelined)
    for at in range(1, steps):
        rig.evictions.clear()
        rig.add(f"a{at}", PROMPT, ASKED, max_tokens=20)
        for _ in range(at):
            rig.step()
        rig.settle()
        rig.evictions.clear()
        rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        rig.run()
        found = [(eviction.seen, eviction.holes) for eviction in rig.evictions]
        assert found == expected or f"a{at}" not in rig.reports
        assert len(rig.tokens[f"a{at}"]) == 20
        prices.add(report(rig, f"a{at}")["tokens_repeated"])
    assert min(prices) == price and max(prices) == 2 * price
    assert len(prices) > 2, "no reader was ended in the midst of its work"


def test_the_cache_can_be_reset_while_readers_wait(model_dir: str) -> None:
    """vLLM takes everything from those who run; readers that wait begin in the blocks of these."""
    resets = 0
    for at in range(1, 40):
        rig = Rig(model_dir, 60, kv_min_tokens=16)
        for number in range(3):
            prompt = range(10_000 * number, 10_000 * number + 100)
            rig.add(f"a{number}", prompt, ASKED, max_tokens=30)
        for _ in range(at):
            rig.step()
        rig.settle()
        if all(reader.status == RequestStatus.RUNNING for reader in readers(rig)):
            continue
        resets += 1
        assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        rig.run()
        assert all(len(rig.tokens[f"a{number}"]) == 30 for number in range(3))
        rig.blocks.check_integrity(idle=True)
    assert resets


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("watermark", [0.0, 0.2])
@pytest.mark.parametrize(("seats", "blocks"), [(2, 60), (3, 27), (16, 27), (16, 40)])
def test_crowds_that_wait_for_their_readers_go_on(
    model_dir: str, policy: str, watermark: float, seats: int, blocks: int
) -> None:
    """Where seats or blocks are for one repetition at a time, and others want them as well."""
    rig = Rig(
        model_dir, blocks + round(watermark * 80), max_num_seqs=seats, policy=policy,
        watermark=watermark, kv_min_tokens=16,
    )  # fmt: skip
    for number in range(4):
        prompt = range(10_000 * number, 10_000 * number + 100)
        rig.add(f"a{number}", prompt, ASKED, max_tokens=30, priority=number % 2)
        rig.add(f"b{number}", prompt, None, max_tokens=90, priority=number % 3)
    rig.run()
    assert all(len(rig.tokens[f"a{number}"]) == 30 for number in range(4))
    assert all(report(rig, f"a{number}")["tokens_repeated"] > 0 for number in range(4))


def test_a_seat_is_left_to_readers(model_dir: str) -> None:
    """Its owner does not wait until somebody ends who has nothing to do with it."""
    rig = Rig(model_dir, 200, max_num_seqs=4, kv_min_tokens=16)
    rig.add("a", PROMPT, ASKED, max_tokens=60)
    for number in range(6):
        rig.add(
            f"b{number}",
            list(range(5000 + 100 * number, 5020 + 100 * number)),
            None,
            max_tokens=200,
        )
    while not rig.reports:
        rig.step()
    assert [*rig.reports] == ["a"]
    rig.run()


def test_an_elastic_request_is_squeezed_once_it_has_been_repeated(model_dir: str) -> None:
    rig = Rig(model_dir, 40, kv_min_tokens=16)
    rig.add("a", PROMPT, ASKED | {"kv_elastic": True}, max_tokens=200)
    while not readers(rig):
        rig.step()
    rig.add("b", list(range(5000, 5400)), None, max_tokens=100)
    while readers(rig):
        assert not rig.evictions
        rig.step()
    rig.run()
    one = report(rig, "a")
    assert one["squeezed_at"] is not None and one["tokens_evicted"] > 0
    assert one["tokens_repeated"] > 0


def test_a_squeezed_request_that_returns_waits_for_its_repetition(model_dir: str) -> None:
    """It computes its answer again as far as it may before its readers have ended."""
    rig = Rig(model_dir, 40, kv_min_tokens=16)
    rig.add("a", PROMPT, ASKED | {"kv_elastic": True}, max_tokens=200)
    for _ in range(100):
        rig.step()
    rig.add("b", list(range(5000, 5400)), None, max_tokens=2)
    while not rig.evictions:
        rig.step()
    point = rig.evictions[0].seen
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.evictions.clear()
    state = rig.blocks.eviction_state("a")
    assert state is not None
    while not state.repeated:
        assert not rig.evictions
        rig.step()
    rig.run()
    assert rig.evictions[0].seen == point
    assert len(rig.tokens["a"]) == 200
