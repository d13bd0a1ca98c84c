# SPDX-License-Identifier: Apache-2.0
"""The picture of a load test. Needs matplotlib (extra ``loadtest``)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from loadtest.common.plots import SMALL, caption, colours, legend, log_ticks, panels, save
from loadtest.common.statistics import percentile
from loadtest.http.rates import Point, points, rates_of
from loadtest.http.records import ALL, Record, Run, pooled, runs_by_variant, summarise

__all__ = ["draw_rates", "draw_runs"]


def draw_runs(runs: Sequence[Run], path: Path) -> Path:
    """Draw ``runs`` into ``path``: what is compared as bars, or one run over time; and all latencies."""
    compared = runs_by_variant(runs)
    figure, (speed, ttft, itl) = panels(3, size=(12.5, 4.0))
    if compared:
        groups = {name: pooled(some) for name, some in compared.items()}
        _bars(speed, compared)
    else:
        records = pooled(runs)
        groups = {
            label: [record for record in records if record.label == label]
            for label in dict.fromkeys(record.label for record in records)
        }
        _over_time(speed, groups)
    _distributions(ttft, itl, groups)
    first = runs[0].description
    server = first.get("server_version")
    title = caption({**first, "versions": {"vllm": server}}, first.get("title"), first.get("model"))
    return save(figure, path, title)


def draw_rates(runs: Sequence[Run], path: Path) -> Path:
    """Draw a comparison over rates into ``path``: a line per variant in each panel."""
    found, rates = points(runs), rates_of(runs)
    shown: tuple[tuple[str, Callable[[Point], list[float]]], ...] = (
        ("generated tokens / s", lambda point: point.tok_per_s),
        ("time to first token, median s", lambda point: point.ttft),
        ("likelihood lost, % of full KV's NLL", lambda point: point.lost),
        ("lossless answers, %", lambda point: [100 * share for share in point.lossless]),
    )
    figure, axes = panels(2, 2, size=(10.5, 7.5))
    for axis, (title, values) in zip(axes, shown, strict=True):
        for name, colour in colours(found).items():
            line = [
                (rate, statistics.median(some))
                for rate, point in found[name].items()
                if (some := values(point))
            ]
            if line:
                axis.plot(*zip(*line, strict=True), "o-", markersize=4, color=colour, label=name)
        log_ticks(axis, rates, "requests per second (Poisson)")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
    legend(axes[0])
    first = runs[0].description
    server = first.get("server_version")
    title = caption({**first, "versions": {"vllm": server}}, first.get("title"), first.get("model"))
    return save(figure, path, title)


def _bars(axis: Any, compared: dict[str, list[Run]]) -> None:
    """Tokens per second: the median of a variant's rounds, and every round as a dot."""
    for place, (name, colour) in enumerate(colours(compared).items()):
        speeds = [summarise(run.records)[ALL].tok_per_s for run in compared[name]]
        height = statistics.median(speeds)
        axis.bar(place, height, 0.7, color=colour)
        axis.plot([place] * len(speeds), speeds, "k.", markersize=4)
        axis.annotate(f"{height:.0f}", (place + 0.2, height), ha="center", va="bottom", fontsize=9)
    axis.set_xticks(range(len(compared)), list(compared), fontsize=SMALL)
    axis.set_ylabel("generated tokens / s")


def _over_time(axis: Any, groups: dict[str, list[Record]]) -> None:
    """Tokens per second of each budget in bins of time."""
    ends = [record.end for group in groups.values() for record in group]
    bins = min(60, max(1, round(max(ends) / 0.5)))
    width = max(ends) / bins
    for name, colour in colours(groups).items():
        counts = [0.0] * bins
        for record in groups[name]:
            for time, tokens in _tokens(record):
                counts[min(bins - 1, int(time / width))] += tokens
        axis.stairs([count / width for count in counts], [i * width for i in range(bins + 1)],
                    color=colour, label=name, linewidth=1.3)  # fmt: skip
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds")
    axis.set_ylabel("generated tokens / s")
    legend(axis)


def _tokens(record: Record) -> list[tuple[float, float]]:
    """When the tokens of a request came: its tokens, shared evenly among its token events."""
    if record.ttft is None:
        return []
    times = list(accumulate([record.at + record.ttft, *(gap / 1000 for gap in record.gaps_ms)]))
    return [(time, record.output_tokens / len(times)) for time in times]


def _distributions(ttft: Any, itl: Any, groups: dict[str, list[Record]]) -> None:
    """Cumulative distributions of both latencies, one step line per group."""
    for name, colour in colours(groups).items():
        samples = summarise(groups[name])[ALL].samples
        gaps = [1000 * gap for gap in samples["itl"]]
        for axis, values in ((ttft, samples["ttft"]), (itl, gaps)):
            shares = [(i + 1) / len(values) for i in range(len(values))]
            if not values:
                continue
            axis.step(sorted(values), shares, where="post", color=colour, label=name, linewidth=1.4)
        if percentile(gaps, 1) > 10 * percentile(gaps, 0.1):
            itl.set_xscale("log")
            # Two events that were read at once are less than that apart.
            itl.set_xlim(left=1)
    ttft.set_xlabel("time to first token, s")
    itl.set_xlabel("inter-token latency, ms")
    ttft.set_ylabel("share of requests")
    itl.set_ylabel("share of tokens")
    for axis in (ttft, itl):
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.25)
        legend(axis, loc="lower right")
