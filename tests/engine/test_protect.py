# SPDX-License-Identifier: Apache-2.0
"""Protected tokens: laws 3, 6 and 7 on the real scheduler and a tiny real pool."""

import math
from typing import Any

import pytest

from tests.engine.scheduling import Rig
from tests.served import policy_of

PROMPT = list(range(1000, 1200))


@pytest.mark.parametrize(
    ("policy", "pipelined"), [("attention", True), ("key", False), ("window", True)]
)
def test_law06_hits_never_pass_the_pin(model_dir: str, policy: str, pipelined: bool) -> None:
    """Cached KV has no scores; a policy that needs none reads what its first eviction frees, or up to it."""
    rig = Rig(model_dir, 100, max_num_batched_tokens=512, pipelined=pipelined)
    rig.add("full", PROMPT, max_tokens=2)
    rig.run()
    for protect, pinned in ((1, 16), (16, 16), (40, 48), (199, 192), ("prompt", 192)):
        asked = {"kv_budget": 0.2, "kv_policy": policy, "kv_protect": protect}
        name = f"protects {protect}"
        rig.add(name, PROMPT, asked, max_tokens=60)
        doomed = (200 - pinned - max(16, math.ceil(0.2 * (200 - pinned)))) // 16
        hit = 192 if policy == "window" else pinned
        reads = policy_of(policy).moves_tokens and not policy_of(policy).needs_scores
        hit += 16 * max(0, doomed) * reads
        assert rig.step().num_scheduled_tokens[name] == len(PROMPT) - hit
        rig.run()
        report = rig.report(name)
        assert report["tokens_cached"] == hit
        assert report["tokens_protected"] == {199: 208, "prompt": 208}.get(protect, pinned)
        evicted = [e for e in rig.evictions if e.request_id == name]
        assert evicted and min(index for e in evicted for index in e.holes) >= pinned // 16


def test_law07_a_protected_chat_reads_its_last_turn(model_dir: str) -> None:
    """Each turn's prompt is the last one's, its answer and 20 new tokens; the answer was evicted from."""
    rig = Rig(model_dir, 200, max_num_batched_tokens=512)
    prompt, cached = PROMPT[:50], []
    for turn in range(4):
        name, asked = f"turn {turn}", {"kv_budget": 0.2, "kv_protect": "prompt"}
        rig.add(name, prompt, asked, max_tokens=90)
        rig.run()
        cached.append(rig.report(name)["tokens_cached"])
        assert rig.report(name)["tokens_evicted"] > 0
        prompt = prompt + rig.tokens[name] + list(range(2000, 2020))
    # The pinned blocks, and what the first eviction frees: one block behind them.
    assert cached == [0, 80, 176, 288]


@pytest.mark.parametrize(
    ("asked", "length", "hit"),
    [
        ({"kv_protect": 50}, 200, 64),
        ({"kv_protect": "prompt"}, 200, 208),
        ({"kv_policy": "window", "kv_protect": 50}, 200, 192),
        ({"kv_policy": "window", "kv_protect": "prompt"}, 200, 208),
        ({"kv_policy": "window", "kv_delay": 2}, 46, 32),
        ({"kv_policy": "key"}, 200, 160),
        ({"kv_policy": "key", "kv_protect": 40}, 200, 160),
        ({"kv_policy": "key", "kv_prefill_tokens": 64}, 200, 16),
        ({"kv_policy": "key", "kv_evict_from": 230}, 200, 176),
        ({"kv_protect": "ends"}, 200, 16),
        # As with 40, up to the end at most.
        ({"kv_policy": "key", "kv_protect": "ends"}, 200, 160),
        ({"kv_policy": "key", "kv_protect": "ends", "kv_evict_from": 280}, 200, 192),
    ],
    ids=str,
)
def test_law05_a_preempted_request_reads_what_it_may_and_evicts_as_before(
    model_dir: str, asked: dict[str, Any], length: int, hit: int
) -> None:
    """What its first eviction published, and what others know of its answer, it must not read."""

    def evictions(*, preempt: bool) -> list[tuple[int, tuple[int, ...]]]:
        rig = Rig(model_dir, 100, max_num_batched_tokens=512)
        fields = {"kv_budget": 0.2, "kv_protect": 0} | asked
        request = rig.add("one", PROMPT[:length], fields, max_tokens=140)
        while request.num_computed_tokens < length + 100:
            rig.step()
        if preempt:
            rig.add("all of it", PROMPT[:length] + rig.tokens["one"], max_tokens=1)
            rig.step()
            rig.evictions.clear()
            rig.scheduler.running.remove(request)
            rig.scheduler._preempt_request(request, 0.0)
            scheduled = rig.step().num_scheduled_tokens["one"]
            assert request.num_computed_tokens - scheduled == hit
        rig.run()
        assert rig.report("one")["tokens_cached"] == 0
        return [(eviction.seen, eviction.holes) for eviction in rig.evictions]

    calm = evictions(preempt=False)
    assert len(calm) > 2
    assert evictions(preempt=True) == calm
