# SPDX-License-Identifier: Apache-2.0
"""Laws 2, 3, 6, 7 and 8 on the real scheduler and a tiny real pool."""

from typing import Any

import pytest

from tests.engine.scheduling import Rig
from tests.served import COUNTED

PROMPT = list(range(1000, 1200))


def test_freed_blocks_serve_others_in_the_same_step(model_dir: str) -> None:
    """A pool that two full requests cannot share is enough for two budgeted ones."""
    rig = Rig(model_dir, 20, max_num_batched_tokens=256)
    rig.add("a", PROMPT, {"kv_budget": 0.2}, max_tokens=60)
    rig.add("b", PROMPT[::-1], {"kv_budget": 0.2}, max_tokens=60)
    rig.step()
    assert rig.live_blocks("a") == 13 and rig.live_blocks("b") == 0
    rig.step()
    assert rig.live_blocks("a") <= 4 and rig.live_blocks("b") == 13
    rig.run()
    assert rig.preemptions == 0
    assert [len(rig.tokens[name]) for name in "ab"] == [60, 60]


@pytest.mark.parametrize("policy", COUNTED)
def test_who_cannot_evict_reads_and_publishes_as_stock(model_dir: str, policy: str) -> None:
    """Scoring with one token, a short chat, each step of a beam search."""
    rig = Rig(model_dir, 100, max_num_batched_tokens=512, kv_min_tokens=128)
    asked = {"kv_budget": 0.2, "kv_policy": policy}
    rig.add("scoring", PROMPT, asked, max_tokens=1)
    assert "scoring" not in rig.step().h2o.policies
    rig.add("again", PROMPT, asked, max_tokens=1)
    assert rig.step().num_scheduled_tokens["again"] == len(PROMPT) - 192
    rig.add("chat", PROMPT[:40], asked, max_tokens=60)
    rig.run()
    rig.add("next turn", PROMPT[:40] + rig.tokens["chat"], asked, max_tokens=2)
    output = rig.step()
    assert output.num_scheduled_tokens["next turn"] == 100 - 96
    assert not output.h2o.policies
    rig.run()
    assert not rig.evictions


BAD: list[dict[str, Any]] = [
    {"kv_budget": "0.2"},
    {"kv_budget": float("nan")},
    {"kv_budget": 0.5, "kv_budget_tokens": 3},
    {"kv_budget_tokens": 2**40},
    {"kv_policy": "best"},
    {"kv_recent": 1.5},
    {"kv_protect": True},
    {"kv_protect": "system"},
    {"kv_heads": "global"},
    {"kv_heads": "shared", "kv_policy": "key"},
]


@pytest.mark.parametrize("asked", BAD, ids=[repr(bad) for bad in BAD])
def test_law08_bad_values_end_their_own_request_only(model_dir: str, asked: dict[str, Any]) -> None:
    """The server never lets these through; the offline API can."""
    rig = Rig(model_dir, 40)
    good = rig.add("good", PROMPT[:50], {"kv_budget": 0.5}, max_tokens=5)
    bad = rig.add("bad", PROMPT[:50], asked, max_tokens=5)
    rig.run()
    assert bad.get_finished_reason() is not None and str(bad.get_finished_reason()) == "error"
    assert str(good.get_finished_reason()) == "length"


def test_a_preemption_takes_back_the_eviction_of_the_same_step(model_dir: str) -> None:
    """By priority a request may be preempted that had its turn, and its eviction, in the same step."""

    def evictions(num_blocks: int) -> list[tuple[int, tuple[int, ...]]]:
        rig = Rig(model_dir, num_blocks, policy="priority")
        rig.add("low", PROMPT[:150], {"kv_budget": 0.5}, max_tokens=200, priority=1)
        while not rig.tokens["low"]:
            rig.step()
        # All four need a block in a step in which "low" has given one back, and go before it.
        for number in range(4):
            rig.add(f"high{number}", PROMPT[100 + number : 158 + number], max_tokens=100)
        rig.run()
        assert (rig.both > 0) is (num_blocks < 100)
        return [(e.seen, e.holes) for e in rig.evictions if e.request_id == "low"]

    calm, tight = evictions(100), evictions(26)
    assert tight[-len(calm) :] == calm


@pytest.mark.parametrize("asked", [None, {"kv_budget": 0.3}], ids=["whole", "budget"])
def test_nobody_overtakes_one_that_waits(model_dir: str, asked: dict[str, Any] | None) -> None:
    """Each of 50 later requests would fit beside the first, the one that waits does not."""
    rig = Rig(model_dir, 30)
    rig.add("first", PROMPT[:150], max_tokens=60)
    while not rig.tokens["first"]:
        rig.step()
    rig.add("waits", PROMPT[::-1] + PROMPT, asked, max_tokens=20)
    for number in range(50):
        rig.add(f"later{number}", [number] * 9, asked, max_tokens=6)
    began, waited = list[str](), 0
    while len(began) < 51:
        # Room for one of the later ones at least.
        waited += rig.blocks.block_pool.get_num_free_blocks() > 0 and not began
        began += [one.req_id for one in rig.step().scheduled_new_reqs]
    assert waited > 30
    assert began == ["waits", *(f"later{number}" for number in range(50))]
    rig.run()
