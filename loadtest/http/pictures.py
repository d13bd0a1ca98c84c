# SPDX-License-Identifier: Apache-2.0
"""The picture of a load test. Needs matplotlib (test tools)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from loadtest.http.records import ALL, Record, Run, percentile, summarise
from loadtest.http.report import variants

__all__ = ["picture"]

COLOURS = ("#6f6f6f", "#d1495b", "#2e6f95", "#e0a030", "#5a8f4e", "#8a5fa8")


def picture(runs: Sequence[Run], path: Path) -> Path:
    """Draw ``runs`` into ``path``: what is compared as bars, or one run over time; and all latencies."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    compared = variants(runs)
    figure, axes = pyplot.subplots(1, 3, figsize=(12.5, 4.0), layout="constrained")
    if compared:
        groups = {name: [r for run in some for r in run.records] for name, some in compared.items()}
        _bars(axes[0], compared)
    else:
        records = [record for run in runs for record in run.records]
        groups = {
            label: [record for record in records if record.label == label]
            for label in dict.fromkeys(record.label for record in records)
        }
        _over_time(axes[0], groups)
    for colour, (name, group) in zip(_colours(len(groups)), groups.items(), strict=True):
        samples = summarise(group)[ALL].samples
        _distribution(axes[1], samples["ttft"], colour, name)
        gaps = [1000 * gap for gap in samples["itl"]]
        _distribution(axes[2], gaps, colour, name)
        if percentile(gaps, 1) > 10 * percentile(gaps, 0.1):
            axes[2].set_xscale("log")
            # Two events that were read at once are less than that apart.
            axes[2].set_xlim(left=1)
    axes[1].set_xlabel("time to first token, s")
    axes[2].set_xlabel("inter-token latency, ms")
    for axis in axes[1:]:
        axis.set_ylabel("share of requests" if axis is axes[1] else "share of tokens")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(runs[0].about), fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _bars(axis: Any, compared: dict[str, list[Run]]) -> None:
    """Tokens per second: the median of a variant's rounds, and every round as a dot."""
    for place, (colour, (_, runs)) in enumerate(
        zip(_colours(len(compared)), compared.items(), strict=True)
    ):
        speeds = [summarise(run.records)[ALL].tok_per_s for run in runs]
        height = statistics.median(speeds)
        axis.bar(place, height, 0.7, color=colour)
        axis.plot([place] * len(speeds), speeds, "k.", markersize=4)
        axis.annotate(f"{height:.0f}", (place + 0.2, height), ha="center", va="bottom", fontsize=9)
    axis.set_xticks(range(len(compared)), list(compared), fontsize=8)
    axis.set_ylabel("generated tokens / s")


def _over_time(axis: Any, groups: dict[str, list[Record]]) -> None:
    """Tokens per second of each budget in bins of time."""
    ends = [record.end for group in groups.values() for record in group]
    bins = min(60, max(1, round(max(ends) / 0.5)))
    width = max(ends) / bins
    for colour, (name, group) in zip(_colours(len(groups)), groups.items(), strict=True):
        counts = [0.0] * bins
        for record in group:
            for time, tokens in _tokens(record):
                counts[min(bins - 1, int(time / width))] += tokens
        axis.stairs([count / width for count in counts], [i * width for i in range(bins + 1)],
                    color=colour, label=name, linewidth=1.3)  # fmt: skip
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds")
    axis.set_ylabel("generated tokens / s")
    axis.legend(frameon=False, fontsize=8)


def _tokens(record: Record) -> list[tuple[float, float]]:
    """When the tokens of a request came: its tokens, shared evenly among its token events."""
    if record.ttft is None:
        return []
    times = list(accumulate([record.at + record.ttft, *(gap / 1000 for gap in record.gaps_ms)]))
    return [(time, record.output_tokens / len(times)) for time in times]


def _distribution(axis: Any, values: list[float], colour: str, name: str) -> None:
    ordered = sorted(values)
    if ordered:
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axis.step(ordered, shares, where="post", color=colour, label=name, linewidth=1.4)


def _title(about: dict[str, Any]) -> str:
    parts = (about.get("title"), about.get("model"), about.get("machine"),
             about.get("server_version") and f"vLLM {about['server_version']}",
             str(about.get("date", ""))[:10])  # fmt: skip
    return ", ".join(part for part in parts if part)
