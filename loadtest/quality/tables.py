# SPDX-License-Identifier: Apache-2.0
"""Figures as Markdown: per metric a table, lines down, budgets across, each value with its interval."""

import math
from typing import Any

from loadtest.common.statistics import DRAWS, LEVEL, Estimate
from loadtest.common.tables import interval, markdown_table
from loadtest.quality.figures import Figures
from loadtest.quality.measures import MEASURES, Metric


def markdown(figures: Figures, runs: list[dict[str, Any]]) -> str:
    """The whole report."""
    parts = [_head(runs), _held(figures)]
    for name, measure in MEASURES.items():
        if name in figures.measures:
            parts += [_table(figures, name, metric) for metric in measure.metrics]
    return "\n\n".join(part for part in parts if part) + "\n"


def cell(figure: Estimate | None, digits: int) -> str:
    """``2.1 (1.4 to 2.9)``."""
    if figure is None or math.isnan(figure.value):
        return ""
    if figure.low == figure.high == figure.value:
        return f"{figure.value:.{digits}f}"
    return interval(figure, f"{{:.{digits}f}}")


def _head(runs: list[dict[str, Any]]) -> str:
    run = runs[-1]
    model = run.get("settings", {})
    facts = (
        f"{model.get('model')}, {model.get('dtype', 'as served')}",
        str(run.get("machine")),
        ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items()),
        f"commit {run.get('commit')}",
        str(run.get("date", ""))[:10],
    )
    notes = (
        f"{'; '.join(facts)}.",
        f"In brackets {LEVEL:.0%} intervals: bootstrap over samples, {DRAWS} draws, paired where compared",
        f"with full KV. Smallest budget: {model.get('kv_min_tokens')} tokens. Full KV is at 1.0;",
        "`full-again` is full KV measured once more among the others.",
    )
    return "\n".join([*(f"    {one.get('command')}" for one in runs), "", *notes])


def _held(figures: Figures) -> str:
    """Whole blocks are freed, so a request holds a little more than its budget; and what it protects."""
    budgets = [budget for budget in figures.budgets if budget < 1.0]
    shares = {
        (name, line): [figures.held(name, line, budget) for budget in budgets]
        for name in MEASURES
        for line in figures.lines
    }
    rows = [[*key, *map(_share, row)] for key, row in shares.items() if any(row)]
    title = "**KV tokens held at the end over tokens seen, median**"
    return _grid(title, ["measure", "policy", *(f"{budget:g}" for budget in budgets)], rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(figures: Figures, measure: str, metric: Metric) -> str:
    rows = []
    samples = 0
    for line in figures.lines:
        cells = [figures.figure(measure, metric, line, budget) for budget in figures.budgets]
        samples = max([samples, *(one.samples for one in cells if one)])
        if any(cells):
            rows.append([line, *(cell(one, metric.digits) for one in cells)])
    better = f", {metric.better} is good" if metric.better else ""
    title = f"**{metric.title}** ({samples} samples{better})"
    return _grid(title, ["policy", *(f"{budget:g}" for budget in figures.budgets)], rows)


def _grid(title: str, head: list[str], rows: list[list[str]]) -> str:
    return f"{title}\n\n{markdown_table(head, rows)}" if rows else ""
