# SPDX-License-Identifier: Apache-2.0
"""The ladder's rows as tables and a picture. Drawing needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.common.statistics import Estimate, mean
from loadtest.common.tables import markdown_table
from loadtest.quality.figures import Figures
from loadtest.quality.ladder.facts import KNOWN, PROTOCOLS, delay_of
from loadtest.quality.ladder.keep import FULL
from loadtest.quality.ladder.summaries import SUMMARIES
from loadtest.quality.measures.base import Metric
from loadtest.quality.rows import Row
from loadtest.quality.ruler.tasks import TASKS
from loadtest.quality.tables import cell

__all__ = ["markdown", "plot", "publish"]

TITLES = {"known": "question known", "later": "question asked later", "nll": "likelihood lost"}
FOUND = Metric("found", "RULER, % of full KV", "ratio", "high", 100, 0)
WROTE = Metric("rouge2", "ROUGE-2, % of full KV's", "ratio", "high", 100, 0)
LOST = Metric("nll", "% of full KV's NLL", "loss", "low", 100, 1)


def publish(runs: list[dict[str, Any]], rows: list[Row], beside: Path) -> None:
    """Print the tables, and write them and the picture beside a file."""
    if not rows:
        raise SystemExit(f"no rows in {beside}")
    figures = Figures.of(rows)
    text = f"# {beside.stem}\n\n![found and lost, by rung]({beside.stem}.png)\n\n{markdown(figures, runs)}"
    beside.with_suffix(".md").write_text(text)
    print(text)
    plot(figures, runs, beside.with_suffix(".png"))


def markdown(figures: Figures, runs: Sequence[dict[str, Any]]) -> str:
    """The whole report."""
    parts = [_head(runs), _overview(figures), _summaries(figures)]
    parts += [
        _by_task(figures, protocol, budget)
        for protocol in _protocols(figures)
        for budget in sorted(_budgets(figures, protocol), reverse=True)
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def compared(
    figures: Figures, measure: str, metric: Metric, name: str, budget: float
) -> Estimate | None:
    """One cell; ``None`` unless the rung was measured on all samples: averages of others say nothing."""
    mine = figures.values(measure, metric.key, name, budget)
    if mine.keys() != figures.values(measure, metric.key, FULL.name, 1.0).keys():
        return None
    return figures.figure(measure, metric, name, budget)


def order(figures: Figures) -> list[str]:
    """Rungs, what finds most first, on average over protocols and budgets; those without a cell last."""

    def merit(name: str) -> tuple[bool, float, float]:
        found = [
            one.value
            for measure, metric in _answered(figures)
            for budget in _budgets(figures, measure)
            if (one := compared(figures, measure, metric, name, budget))
        ]
        lost = [
            one.value
            for budget in _budgets(figures, "nll")
            if (one := compared(figures, "nll", LOST, name, budget))
        ]
        return not (found or lost), -sum(found) / max(1, len(found)), sum(lost)

    return sorted((name for name in figures.lines if name != FULL.name), key=merit)


def _head(runs: Sequence[dict[str, Any]]) -> str:
    run = runs[-1]
    facts = (
        f"{run['settings']['model']}, {run['settings']['dtype']}", run["machine"],
        ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        f"commit {', '.join(dict.fromkeys(str(one['commit']) for one in runs))}", run["date"][:10],
    )  # fmt: skip
    commands = dict.fromkeys(f"    {one['command']}" for one in runs)
    return "\n".join([*commands, "", "; ".join(facts) + "."])


def _overview(figures: Figures) -> str:
    """One line per rung."""
    columns = [
        (measure, metric, budget)
        for measure, metric in [*_answered(figures), ("nll", LOST)]
        for budget in sorted(_budgets(figures, measure), reverse=True)
        if any(compared(figures, measure, metric, name, budget) for name in figures.lines)
    ]
    head = [
        f"{_title(measure)}, {budget:g} "
        f"({len(figures.values(measure, metric.key, FULL.name, 1.0))} samples)"
        for measure, metric, budget in columns
    ]
    lines = []
    for name in order(figures):
        cells = [
            (compared(figures, measure, metric, name, budget), metric.digits)
            for measure, metric, budget in columns
        ]
        if any(one for one, _ in cells):
            lines.append([f"`{name}`", *(cell(*one) for one in cells)])
    note = (
        "What is found is in % of what full KV finds, likelihood lost in % of full KV's NLL. In brackets "
        "95 % intervals: bootstrap over samples, paired with full KV. Only rungs that were measured on all "
        "samples."
    )
    return f"{note}\n\n{markdown_table(['rung', *head], lines)}"


def _by_task(figures: Figures, protocol: str, budget: float) -> str:
    """Absolute scores: what full KV does not find, nobody can."""
    tasks = [task for task in TASKS if _of_task(figures, protocol, task, FULL.name, 1.0)]
    lines = []
    for name in (FULL.name, *order(figures)):
        share = 1.0 if name == FULL.name else budget
        found = [_of_task(figures, protocol, task, name, share) for task in tasks]
        if any(found):
            lines.append(
                [f"`{name}`", *("" if one is None else f"{one.value:.0f}" for one in found)]
            )
    samples = max(
        (one.samples for t in tasks if (one := _of_task(figures, protocol, t, FULL.name, 1.0))),
        default=0,
    )
    title = f"**RULER, %, {_title(protocol)}, budget {budget:g}** (up to {samples} samples a task)"
    return f"{title}\n\n{markdown_table(['rung', *tasks], lines)}" if lines else ""


def _of_task(
    figures: Figures, protocol: str, task: str, name: str, budget: float
) -> Estimate | None:
    values = [
        value
        for sample, value in figures.values(protocol, "found", name, budget).items()
        if sample.rpartition("-")[0] == task
    ]
    return mean(values).scaled(100) if values else None


def _summaries(figures: Figures) -> str:
    """Absolute scores: how good full KV's are."""
    columns = [
        (measure, budget)
        for measure in _delays(figures, SUMMARIES)
        for budget in _budgets(figures, measure)
    ]
    lines = []
    for name in (FULL.name, *order(figures)):
        shares = [(measure, 1.0 if name == FULL.name else budget) for measure, budget in columns]
        values = [figures.values(measure, WROTE.key, name, share) for measure, share in shares]
        if any(values):
            lines.append(
                [f"`{name}`", *(cell(mean([*v.values()]), 1) if v else "" for v in values)]
            )
    head = ["rung", *(f"{_title(measure)}, {budget:g}" for measure, budget in columns)]
    return f"**ROUGE-2**\n\n{markdown_table(head, lines)}" if lines else ""


def _answered(figures: Figures) -> list[tuple[str, Metric]]:
    """Measures that judge an answer, with what they judge it by."""
    found = [(protocol, FOUND) for protocol in _protocols(figures)]
    return found + [(measure, WROTE) for measure in _delays(figures, SUMMARIES)]


def _protocols(figures: Figures) -> list[str]:
    """Those that were measured, delays in order."""
    return [*(p for p in PROTOCOLS if p in figures.measures), *_delays(figures, KNOWN)]


def _delays(figures: Figures, measure: str) -> list[str]:
    """Those of a measure, in order."""
    mine = [one for one in figures.measures if one.startswith(f"{measure}@")]
    return sorted(mine, key=lambda one: delay_of(one) or 0)


def _title(measure: str) -> str:
    delay = delay_of(measure)
    if delay is None:
        return TITLES[measure]
    return f"{measure.partition('@')[0]}, evicted {delay} tokens after the prompt"


def _budgets(figures: Figures, measure: str) -> list[float]:
    return sorted({row.budget for row in figures.rows if row.measure == measure and row.budget < 1})


def plot(figures: Figures, runs: Sequence[dict[str, Any]], path: Path) -> Path:
    """A panel for each protocol and for the likelihood: every rung at every budget, with its interval."""
    from loadtest.common import plots

    columns = [one for one in [*_answered(figures), ("nll", LOST)] if _budgets(figures, one[0])]
    names = [
        name
        for name in reversed(order(figures))
        if any(
            compared(figures, m, metric, name, b)
            for m, metric in columns
            for b in _budgets(figures, m)
        )
    ]
    size = (3.6 * len(columns) + 2, 0.24 * len(names) + 1.2)
    figure, axes = plots.panels(len(columns), size=size, sharey=True)
    for axis, (measure, metric) in zip(axes, columns, strict=True):
        budgets = _budgets(figures, measure)
        for colour, budget in zip((plots.RED, plots.BLUE, plots.YELLOW), budgets, strict=False):
            found = {
                n: one for n in names if (one := compared(figures, measure, metric, n, budget))
            }
            places = [names.index(name) for name in found]
            if not found:
                continue
            errors = list(zip(*(one.errors for one in found.values()), strict=True))
            axis.errorbar(
                [one.value for one in found.values()], places, xerr=errors, fmt="o", markersize=4,
                color=colour, label=f"budget {budget:g}", elinewidth=0.8, alpha=0.85,
            )  # fmt: skip
        axis.set_title(f"{_title(measure)}\n{metric.title}", fontsize=plots.NOTE)
        axis.set_yticks(range(len(names)), names, fontsize=plots.SMALL)
        axis.grid(alpha=0.25)
        plots.legend(axis)
    run = runs[-1]
    return plots.save(figure, path, plots.caption(run, run["settings"]["model"], "95 % intervals"))
