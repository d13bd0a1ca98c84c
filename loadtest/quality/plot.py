# SPDX-License-Identifier: Apache-2.0
"""The picture of a quality run: figures against budgets, one panel per metric. Needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from loadtest.quality.figures import Figures
from loadtest.quality.lines import AGAIN, FULL
from loadtest.quality.measures import MEASURES, Metric

__all__ = ["plot_quality"]

FIXED = {"h2o": "#d1495b", "window": "#2e6f95", "random": "#b0b0b0"}
"""Always the same, in every picture of the project."""
COLOURS = ("#e0a030", "#5a8f4e", "#8a5fa8", "#d98cb3", "#3bb0a8", "#7a5a3a", "#000080")
COLUMNS = 4


def plot_quality(figures: Figures, runs: list[dict[str, Any]], path: Path) -> Path:
    """Draw all pictured metrics that were measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = [
        (name, metric)
        for name, measure in MEASURES.items()
        for metric in measure.metrics
        if metric.pictured and name in figures.measures and _measured(figures, name, metric)
    ]
    columns = min(COLUMNS, len(panels))
    height = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(
        height, columns, figsize=(3.5 * columns, 3.1 * height + 0.6), layout="constrained", squeeze=False
    )  # fmt: skip
    lines = [line for line in figures.lines if line not in (FULL.line.name, AGAIN.line.name)]
    others = [line for line in lines if line not in FIXED]
    colours = FIXED | {line: COLOURS[i % len(COLOURS)] for i, line in enumerate(others)}
    for axis, (name, metric) in zip(axes.flat, panels, strict=False):
        _panel(axis, figures, name, metric, {line: colours[line] for line in lines})
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    handles = {
        text: handle
        for axis in axes.flat
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8
    )  # fmt: skip
    about = runs[-1]
    versions = about.get("versions", {})
    parts = (about.get("settings", {}).get("model"), f"vLLM {versions.get('vllm')}",
             str(about.get("date", ""))[:10], "bars: 95 % bootstrap intervals")  # fmt: skip
    figure.suptitle(", ".join(str(part) for part in parts if part), fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _measured(figures: Figures, name: str, metric: Metric) -> bool:
    return any(metric.key in row.values for row in figures.rows if row.measure == name)


def _panel(axis: Any, figures: Figures, name: str, metric: Metric, colours: dict[str, str]) -> None:
    budgets = [budget for budget in figures.budgets if budget < 1.0]
    full = figures.figure(name, metric, FULL.line.name, FULL.budget)
    if full is not None:
        axis.axhline(full.value, color="black", linestyle="--", linewidth=1, label="full KV")
    for place, (line, colour) in enumerate(colours.items()):
        found = {b: figures.figure(name, metric, line, b) for b in budgets}
        there = {
            b: one for b, one in found.items() if one is not None and not math.isnan(one.value)
        }
        if not there:
            continue
        # A little aside of each other, so that no bar hides another.
        x = [budget * (1 + 0.02 * (place - len(colours) / 2)) for budget in there]
        y = [one.value for one in there.values()]
        bars = [
            [max(0.0, one.value - one.low) for one in there.values()],
            [max(0.0, one.high - one.value) for one in there.values()],
        ]
        width = 1.8 if line == "h2o" else 1.2
        axis.errorbar(x, y, yerr=bars, color=colour, label=line, linewidth=width, elinewidth=0.6,
                      marker="o", markersize=3)  # fmt: skip
    axis.set_xscale("log")
    axis.set_xticks(budgets, [f"{budget:g}" for budget in budgets], fontsize=8)
    axis.minorticks_off()
    axis.set_xlabel("kv_budget", fontsize=8)
    title = metric.title if len(metric.title) < 48 else metric.title.replace(", ", ",\n", 1)
    axis.set_title(title, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
