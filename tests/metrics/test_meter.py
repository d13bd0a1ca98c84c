# SPDX-License-Identifier: Apache-2.0
"""The engine core's counts: every event is handed over once, and none is forgotten."""

from typing import Any

import pytest

from h2o_vllm.blocks.counts.squeeze import SqueezeCounts
from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.metrics.meter import INTERVAL, Meter, kv_budget_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def eviction(holes: int) -> Eviction:
    return Eviction("a", (), tuple(range(holes)), tuple(range(holes)))


def report(budget: float | None, budget_tokens: int = 100, seen: int = 400) -> dict[str, Any]:
    counts = {"tokens_cached": 96, "tokens_protected": 128}
    own = {"budget": budget, "budget_tokens": budget_tokens, "tokens_seen": seen}
    return {**own, **counts, "elastic": False, "exact": False, "squeezed_at": None}


def test_what_happened_is_handed_over_once() -> None:
    meter = Meter(block_size=16)
    meter.evicted([eviction(3), eviction(2)])
    meter.evicted(
        [Eviction("s", (7,), (1, 2), (1,), places=(0,)), Eviction("s", (9,), (), (), places=(2,))]
    )
    meter.settle_was_short(3)
    meter.eviction_took(0.25)
    meter.eviction_took(None)
    # Only of requests with a budget: the other would have read the cache anyway.
    meter.ended([report(0.2), report(1.0)])
    # Elastic: one that kept everything, one that was squeezed.
    meter.squeezed(SqueezeCounts(requests=2, blocks=9, preemptions_avoided=1))
    meter.ended([report(0.3) | {"elastic": True, "squeezed_at": at} for at in (None, 321)])
    assert meter.hand_over([(400, 5), (100, 0)]) == {
        "evicted_tokens": 96,
        "freed_blocks": 6,
        "cached_tokens": 3 * 96,
        "protected_tokens": 3 * 128,
        "kv_tokens_full": 500,
        "kv_tokens_held": 420,
        "squeezed_requests": 2,
        "squeezed_blocks": 9,
        "preemptions_avoided": 1,
        "settled_segments": 2,
        "found_segments": 1,
        "settle_shortages": 3,
        "elastic_answers": 2,
        "lossless_answers": 1,
        "request_kv_budget": [0.2, 1.0, 1.0, 0.3],
        "eviction_seconds": [0.25],
    }
    assert not any(meter.hand_over([]).values())


def test_it_is_due_now_and_then_and_when_idle() -> None:
    clock = Clock()
    meter = Meter(16, clock)
    assert meter.due(idle=False)
    meter.hand_over([])
    assert not meter.due(idle=False)
    assert meter.due(idle=True)
    clock.now += INTERVAL
    assert meter.due(idle=False)


@pytest.mark.parametrize(
    ("ended", "share"),
    [
        (report(0.2), 0.2),
        (report(1.0), 1.0),
        (report(None), 0.25),
        (report(None, seen=50), 1.0),
        # It evicts nothing; a tenth is what drafts read.
        (report(0.1) | {"exact": True}, 1.0),
        # Aborted before its first token.
        (report(None, seen=0), 1.0),
    ],
    ids=["share", "full", "absolute", "larger than needed", "exact", "nothing seen"],
)
def test_budget_of_a_request_is_a_share(ended: dict[str, Any], share: float) -> None:
    assert kv_budget_of(ended) == share
