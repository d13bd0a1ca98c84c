# SPDX-License-Identifier: Apache-2.0
"""Counts evictions, and sends the counts at intervals. Engine core; imports no vLLM.

A step that evicts costs a few additions; any other step reads the clock once.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from h2o_vllm.blocks.counts.squeeze import SqueezeCounts
from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.metrics.table import COUNTED

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
        self._counts: Counter[str] = Counter()
        self._eviction_seconds: list[float] = []
        self._budgets: list[float] = []

    def evicted(self, evictions: Sequence[Eviction]) -> None:
        """Count the evictions of one step."""
        for eviction in evictions:
            self._counts["freed_blocks"] += len(eviction.holes)
            self._counts["evicted_tokens"] += len(eviction.holes) * self._block_size
            if eviction.places:
                self._counts["settled_segments"] += 1
                self._counts["found_segments"] += not eviction.moves

    def squeezed(self, counts: SqueezeCounts) -> None:
        """Add the counts of squeezes."""
        self._counts["squeezed_requests"] += counts.requests
        self._counts["squeezed_blocks"] += counts.blocks
        self._counts["preemptions_avoided"] += counts.preemptions_avoided

    def settle_was_short(self, times: int) -> None:
        """Count segments that had to wait for free blocks."""
        self._counts["settle_shortages"] += times

    def eviction_took(self, seconds: float | None) -> None:
        """Add the seconds that a worker took for the evictions of one step; ``None`` without evictions."""
        if seconds is not None:
            self._eviction_seconds.append(seconds)

    def ended(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Count requests that ended: budgets, and cached and protected tokens of those with a budget."""
        for report in reports:
            budget = kv_budget_of(report)
            lossless = report["elastic"] and report["squeezed_at"] is None
            self._counts["elastic_answers"] += report["elastic"]
            self._counts["lossless_answers"] += lossless
            self._budgets.append(1.0 if lossless else budget)
            if budget < 1.0:
                self._counts["cached_tokens"] += report["tokens_cached"]
                self._counts["protected_tokens"] += report["tokens_protected"]

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
            **{name: self._counts[name] for name in COUNTED},
            "kv_tokens_full": full,
            "kv_tokens_held": full - holes * self._block_size,
            "request_kv_budget": self._budgets,
            "eviction_seconds": self._eviction_seconds,
        }
        self._counts.clear()
        self._budgets, self._eviction_seconds = [], []
        return stats


def kv_budget_of(report: Mapping[str, Any]) -> float:
    """The share of its tokens that a request's budget allowed, 0 to 1, from its final report."""
    if report["exact"]:
        # The budget in its report is the share that drafts read.
        return 1.0
    if report["budget"] is not None:
        return float(report["budget"])
    return min(1.0, float(report["budget_tokens"] / max(1, report["tokens_seen"])))
