# SPDX-License-Identifier: Apache-2.0
"""The picture of a quality run: figures against budgets, one panel per metric. Needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from loadtest.common.plots import (
    POLICIES,
    SMALL,
    Curve,
    budget_axis,
    caption,
    colours,
    panels,
    save,
)
from loadtest.common.statistics import Estimate
from loadtest.quality.figures import Figures
from loadtest.quality.lines import AGAIN, FULL
from loadtest.quality.measures import MEASURES, Metric

__all__ = ["plot_quality"]

COLUMNS = 4
MISSING = Estimate(math.nan, math.nan, math.nan, 0)


def plot_quality(figures: Figures, runs: list[dict[str, Any]], path: Path) -> Path:
    """Draw all pictured metrics that were measured."""
    pictured = [
        (name, metric)
        for name, measure in MEASURES.items()
        for metric in measure.metrics
        if metric.pictured and name in figures.measures and _measured(figures, name, metric)
    ]
    columns = min(COLUMNS, len(pictured))
    height = math.ceil(len(pictured) / columns)
    figure, axes = panels(columns, height, size=(3.5 * columns, 3.1 * height + 0.6))
    lines = [line for line in figures.lines if line not in (FULL.line.name, AGAIN.line.name)]
    for axis, (name, metric) in zip(axes, pictured, strict=False):
        _panel(axis, figures, name, metric, colours(lines, POLICIES))
    for axis in axes[len(pictured) :]:
        axis.set_visible(False)
    handles = {
        text: handle
        for axis in axes
        for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False,
        fontsize=SMALL,
    )  # fmt: skip
    run = runs[-1]
    model = run.get("settings", {}).get("model")
    return save(figure, path, f"{caption(run, model)}; bars: 95 % bootstrap intervals")


def _measured(figures: Figures, name: str, metric: Metric) -> bool:
    return any(metric.key in row.values for row in figures.rows if row.measure == name)


def _panel(axis: Any, figures: Figures, name: str, metric: Metric, known: dict[str, str]) -> None:
    budgets = [budget for budget in figures.budgets if budget < 1.0]
    full = figures.figure(name, metric, FULL.line.name, FULL.budget)
    if full is not None:
        axis.axhline(full.value, color="black", linestyle="--", linewidth=1, label="full KV")
    curves = [
        Curve(line, colour, [figures.figure(name, metric, line, b) or MISSING for b in budgets])
        for line, colour in known.items()
    ]
    budget_axis(axis, budgets, curves, spread=1.02, markersize=3, elinewidth=0.6, capsize=0)
    axis.xaxis.label.set_size(SMALL)
    title = metric.title if len(metric.title) < 48 else metric.title.replace(", ", ",\n", 1)
    axis.set_title(title, fontsize=SMALL)
    axis.tick_params(labelsize=SMALL)
