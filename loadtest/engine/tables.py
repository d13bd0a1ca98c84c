# SPDX-License-Identifier: Apache-2.0
"""Tables of benchmark rows: what was measured, and how it compares within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from loadtest.engine.workloads import WORKLOADS

__all__ = ["decode_ms", "measured", "measured_table", "ratio_table"]

Row = dict[str, Any]


def decode_ms(row: Row) -> float:
    """Milliseconds per decode step at the largest batch that ran often enough to tell."""
    steps = row["decode_ms"]
    return float(steps[max(steps, key=int)]) if steps else float("nan")


COLUMNS: tuple[tuple[str, Callable[[Row], float], str], ...] = (
    ("tok/s", lambda row: row["tok_per_s"], "{:.1f}"),
    ("running", lambda row: row["running_mean"], "{:.1f}"),
    ("max", lambda row: row["running_max"], "{:.0f}"),
    ("preempt.", lambda row: row["preemptions"], "{:.0f}"),
    ("blocks mean", lambda row: row["blocks_mean"], "{:.0f}"),
    ("peak", lambda row: row["blocks_peak"], "{:.0f}"),
    ("prompts s", lambda row: row["prompts_s"], "{:.1f}"),
    ("decode step ms", decode_ms, "{:.1f}"),
    ("TTFT p50 s", lambda row: row["ttft_s"]["p50"], "{:.2f}"),
    ("p99", lambda row: row["ttft_s"]["p99"], "{:.2f}"),
    ("ITL p50 ms", lambda row: row["itl_s"]["p50"] * 1e3, "{:.1f}"),
    ("p99", lambda row: row["itl_s"]["p99"] * 1e3, "{:.1f}"),
    ("RSS MiB", lambda row: row["peak_rss_mib"], "{:.0f}"),
)


def measured_table(rows: list[Row]) -> str:
    """Medians over the rounds, per workload and variant. Markdown."""
    lines = [
        _line("workload", "variant", *(name for name, _, _ in COLUMNS)),
        _rule(2 + len(COLUMNS)),
    ]
    for workload, variant in dict.fromkeys((row["workload"], row["variant"]) for row in rows):
        mine = [row for row in rows if (row["workload"], row["variant"]) == (workload, variant)]
        cells = [style.format(statistics.median(map(of, mine))) for _, of, style in COLUMNS]
        lines.append(_line(workload, variant, *cells))
    return "\n".join(lines)


RATIOS: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("tok/s", lambda row: row["tok_per_s"]),
    ("decode step", decode_ms),
    ("prompts", lambda row: row["prompts_s"]),
)


def ratio_table(rows: list[Row]) -> str:
    """Ours over each baseline of the same round: median (smallest-largest). Markdown.

    A baseline was measured once per traffic: stock vLLM does not know budgets.
    """
    head = _line("workload", "ours over", *(name for name, _ in RATIOS), "same tokens")
    lines = [head, _rule(3 + len(RATIOS))]
    baselines = dict.fromkeys(row["variant"] for row in rows if row["variant"] != "h2o")
    for workload in dict.fromkeys(row["workload"] for row in rows if row["variant"] == "h2o"):
        for variant in baselines:
            pairs = list(_pairs(rows, workload, variant))
            if pairs:
                cells = [_spread([of(ours) / of(it) for ours, it in pairs]) for _, of in RATIOS]
                same = sum(ours["tokens_hash"] == it["tokens_hash"] for ours, it in pairs)
                lines.append(_line(workload, variant, *cells, f"{same} of {len(pairs)}"))
    return "\n".join(lines)


def measured(rows: list[Row], workload: str, variant: str) -> list[Row]:
    """The rows that tell how ``variant`` serves ``workload``, its twin's if it has one."""
    mine = [row for row in rows if (row["workload"], row["variant"]) == (workload, variant)]
    if mine or variant == "h2o":
        return mine
    traffic = WORKLOADS[workload].traffic
    return [
        row
        for row in rows
        if row["variant"] == variant and WORKLOADS[row["workload"]].traffic == traffic
    ]


def _pairs(rows: list[Row], workload: str, variant: str) -> list[tuple[Row, Row]]:
    baseline = {row["round"]: row for row in measured(rows, workload, variant)}
    return [
        (row, baseline[row["round"]])
        for row in measured(rows, workload, "h2o")
        if row["round"] in baseline
    ]


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
