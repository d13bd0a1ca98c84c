# SPDX-License-Identifier: Apache-2.0
"""From the engine's reports to the ``kv_cache`` object of a response. Imports no vLLM.

API-server process. One sequence gives the engine's report unchanged; several (``n > 1`` or several prompts)
give one object with the same keys, summed counts, and the report of each sequence.
"""

from collections.abc import Mapping
from typing import Any

SUMMED = ("tokens_", "blocks_", "peak_")
"""Keys with these beginnings are summed. The sum of peaks bounds the peak of the sum from above."""

REASON = "nothing_evicted_reason"


class Reports:
    """The engine's reports of one HTTP request, in the order of its choices.

    One request may be several calls of the engine (one per prompt), and one call may be several
    sequences (``n > 1``).
    """

    def __init__(self) -> None:
        self._calls: list[dict[int, Mapping[str, Any]]] = []

    def open_call(self) -> int:
        """Number of the next call. Calls are made in the order of the prompts."""
        self._calls.append({})
        return len(self._calls) - 1

    def record(self, call: int, by_index: Mapping[str, Mapping[str, Any]]) -> None:
        """Add reports of sequences of ``call``; a later one replaces an earlier one."""
        for index, report in by_index.items():
            self._calls[call][int(index)] = report

    def kv_cache(self) -> dict[str, Any] | None:
        """The object for the client, or ``None`` if the engine has reported nothing."""
        return kv_cache([call[index] for call in self._calls for index in sorted(call)])


def kv_cache(reports: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """``reports``, one per sequence in choice order, as one ``kv_cache`` object."""
    if not reports:
        return None
    first, *others = reports
    if not others:
        return dict(first)
    sums = {key: sum(report[key] for report in reports) for key in first if key.startswith(SUMMED)}
    budgets = [report["budget_tokens"] for report in reports]
    squeezes = [report["squeezed_at"] for report in reports if report["squeezed_at"] is not None]
    joined = {
        "budget_tokens": None if None in budgets else sum(budgets),
        # ``None`` only if all are lossless.
        "squeezed_at": min(squeezes, default=None),
        REASON: None if sums["tokens_evicted"] else first[REASON],
    }
    return {**first, **joined, **sums, "sequences": reports}
