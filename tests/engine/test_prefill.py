# SPDX-License-Identifier: Apache-2.0
"""Bounded prompts on the real scheduler and a tiny real pool: what they hold, who gets in, who is refused."""

import math

import pytest

from tests.engine.scheduling import Rig

BLOCK = 16
BOUND = 128
ASKED = {"kv_budget": 0.2, "kv_prefill_tokens": BOUND}


def prompt_of(number: int, length: int) -> list[int]:
    """A prompt that shares nothing with the others."""
    return list(range(10_000 * (number + 1), 10_000 * (number + 1) + length))


@pytest.mark.parametrize(("batched_tokens", "pipelined"), [(16, True), (50, False), (512, True)])
@pytest.mark.parametrize("policy", ["attention", "key"])
def test_law03_a_bounded_prompt_never_holds_more(
    model_dir: str, policy: str, batched_tokens: int, pipelined: bool
) -> None:
    rig = Rig(model_dir, 80, max_num_batched_tokens=batched_tokens, pipelined=pipelined)
    asked = ASKED | {"kv_budget": 0.1, "kv_policy": policy, "kv_protect": 20}
    rig.add("a", prompt_of(0, 700), asked, max_tokens=40)
    pinned = 32
    most = 0
    while rig.scheduler.has_unfinished_requests():
        rig.step()
        if "a" in rig.blocks.req_to_blocks:
            most = max(most, rig.live_blocks("a"))
    assert most <= (pinned + BOUND) // BLOCK
    one = rig.report("a")
    assert one["peak_blocks"] == most == (pinned + BOUND) // BLOCK
    assert one["prefill_tokens"] == BOUND
    assert one["squeezed_at"] == pinned + BOUND
    assert one["tokens_protected"] == pinned
    inside = [eviction.seen for eviction in rig.evictions if eviction.seen < 700]
    assert inside == list(range(pinned + BOUND, 700, BOUND // 4))
    rig.blocks.check_integrity(idle=True)


def test_prompt_that_is_larger_than_the_pool_is_served(model_dir: str) -> None:
    """3,000 tokens through a pool of 240; an endless stream but for the model's length."""
    rig = Rig(model_dir, 16, max_num_batched_tokens=64)
    asked = {"kv_budget_tokens": 96, "kv_prefill_tokens": BOUND}
    rig.add("a", prompt_of(0, 3000), asked, max_tokens=1000)
    rig.run(limit=3000)
    assert rig.preemptions == 0
    assert len(rig.tokens["a"]) == 1000
    one = rig.report("a")
    assert one["tokens_seen"] == 3999
    assert one["tokens_held"] <= 96 + BLOCK
    assert one["peak_blocks"] == BOUND // BLOCK


def test_elastic_request_with_a_prompt_beyond_its_bound_is_lossless_no_more(model_dir: str) -> None:
    """One that stays within it is, though."""
    rig = Rig(model_dir, 100, max_num_batched_tokens=512)
    asked = ASKED | {"kv_elastic": True}
    rig.add("long", prompt_of(0, 500), asked, max_tokens=20)
    rig.add("short", prompt_of(1, 100), asked, max_tokens=20)
    rig.run()
    assert rig.report("long")["squeezed_at"] == BOUND
    assert rig.report("long")["tokens_held"] <= math.ceil(0.2 * 520) + BLOCK
    assert rig.report("short")["squeezed_at"] is None
    assert rig.report("short")["tokens_evicted"] == 0


@pytest.mark.parametrize(
    ("max_tokens", "together"),
    [(4, 59 * 16 // 128), (60, 59 * 16 // 163), (3000, 59 * 16 // 216)],
    ids=["bound", "answer", "budget"],
)
def test_admission_counts_what_others_are_to_hold(
    model_dir: str, max_tokens: int, together: int
) -> None:
    """While their prompts are computed they hold less: whoever came in then would have one begun anew."""
    rig = Rig(model_dir, 60, max_num_batched_tokens=512)
    for number in range(12):
        rig.add(f"{number}", prompt_of(number, 1000), ASKED, max_tokens=max_tokens)
    running = 0
    # Of an answer without an end its beginning is what counts.
    while rig.scheduler.has_unfinished_requests() and max(map(len, rig.tokens.values())) < 100:
        rig.step()
        running = max(running, len(rig.scheduler.running))
    assert running == together
    assert rig.preemptions == 0
