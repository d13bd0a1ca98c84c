# SPDX-License-Identifier: Apache-2.0
"""Counts evictions, and sends the counts at intervals. Engine core; imports no vLLM.

A step that evicts costs a few additions; any other step reads the clock once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from h2o_vllm.blocks.counts.squeeze import SqueezeCounts
from h2o_vllm.blocks.plan import Eviction

INTERVAL = 0.2
"""Seconds between two hand-overs while requests run. Prometheus scrapes less often."""


class Meter:
    """Counts since the last hand-over.

    Args:
        block_size: tokens per block.
        clock: monotonic time in seconds.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_size = block_size
        self._clock = clock
        self._next_hand_over = clock()
        self._freed_blocks = 0
        self._cached_tokens = self._protected_tokens = 0
        self._squeezes = SqueezeCounts()
        self._settled_segments = self._found_segments = self._settle_shortages = 0
        self._elastic_answers = self._lossless_answers = 0
        self._eviction_seconds: list[float] = []
        self._budgets: list[float] = []

    def evicted(self, evictions: Sequence[Eviction]) -> None:
        """Count the evictions of one step."""
        for eviction in evictions:
            self._freed_blocks += len(eviction.holes)
            if eviction.places:
                self._settled_segments += 1
                self._found_segments += not eviction.moves

    def squeezed(self, counts: SqueezeCounts) -> None:
        """Add the counts of squeezes."""
        self._squeezes.requests += counts.requests
        self._squeezes.blocks += counts.blocks
        self._squeezes.preemptions_avoided += counts.preemptions_avoided

    def settle_was_short(self, times: int) -> None:
        """Count segments that had to wait for free blocks."""
        self._settle_shortages += times

    def eviction_took(self, seconds: float | None) -> None:
        """Add the seconds that a worker took for the evictions of one step; ``None`` without evictions."""
        if seconds is not None:
            self._eviction_seconds.append(seconds)

    def ended(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Count requests that ended: budgets, and cached and protected tokens of those with a budget."""
        for report in reports:
            budget = kv_budget_of(report)
            lossless = report["elastic"] and report["squeezed_at"] is None
            self._elastic_answers += report["elastic"]
            self._lossless_answers += lossless
            self._budgets.append(1.0 if lossless else budget)
            if budget < 1.0:
                self._cached_tokens += report["tokens_cached"]
                self._protected_tokens += report["tokens_protected"]

    def due(self, *, idle: bool) -> bool:
        """Whether to hand over now. An idle engine hands over at once, as no later step would."""
        return idle or self._clock() >= self._next_hand_over

    def hand_over(self, counts: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """The counts since the last call, and the gauges now; plain values.

        Args:
            counts: (tokens computed, blocks evicted) of each running request.
        """
        self._next_hand_over = self._clock() + INTERVAL
        full = holes = 0
        for computed, evicted in counts:
            full += computed
            holes += evicted
        stats = {
            "evicted_tokens": self._freed_blocks * self._block_size,
            "freed_blocks": self._freed_blocks,
            "cached_tokens": self._cached_tokens,
            "protected_tokens": self._protected_tokens,
            "kv_tokens_full": full,
            "kv_tokens_held": full - holes * self._block_size,
            "squeezed_requests": self._squeezes.requests,
            "squeezed_blocks": self._squeezes.blocks,
            "preemptions_avoided": self._squeezes.preemptions_avoided,
            "settled_segments": self._settled_segments,
            "found_segments": self._found_segments,
            "settle_shortages": self._settle_shortages,
            "elastic_answers": self._elastic_answers,
            "lossless_answers": self._lossless_answers,
            "request_kv_budget": self._budgets,
            "eviction_seconds": self._eviction_seconds,
        }
        self._freed_blocks, self._budgets, self._eviction_seconds = 0, [], []
        self._cached_tokens = self._protected_tokens = 0
        self._squeezes = SqueezeCounts()
        self._settled_segments = self._found_segments = self._settle_shortages = 0
        self._elastic_answers = self._lossless_answers = 0
        return stats


def kv_budget_of(report: Mapping[str, Any]) -> float:
    """The share of its tokens that a request's budget allowed, 0 to 1, from its final report."""
    if report["exact"]:
        # The budget in its report is the share that drafts read.
        return 1.0
    if report["budget"] is not None:
        return float(report["budget"])
    return min(1.0, float(report["budget_tokens"] / max(1, report["tokens_seen"])))
