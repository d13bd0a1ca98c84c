# SPDX-License-Identifier: Apache-2.0
"""Table and picture of what ``loadtest.quality.foresight`` measured. Drawing needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtest.quality.bootstrap import ratio
from loadtest.quality.cadence_report import (
    Interval,
    Line,
    budgets,
    draw_lines,
    line,
    provenance,
    spread,
)

__all__ = ["plot", "report"]

Row = dict[str, Any]

LABELS = {
    "past": "h2o",
    "future": "knows all later attention",
    "future, recent 0.1": "the same, a tenth recent",
}
COLOURS = {"past": "#d1495b", "future": "#2e6f95", "future, recent 0.1": "#e0a030"}


def report(rows: list[Row], picture: str) -> str:
    """Markdown: one line per budget and ranking."""
    names = list(dict.fromkeys(row["text"] for row in rows))
    first = rows[0]
    lines = [
        line("budget", "ranked by", "NLL loss to full KV, %", *names),
        "|" + "---|" * (3 + len(names)),
    ]
    for budget in budgets(rows):
        for ranking in rankings(rows):
            mine = select(rows, budget, ranking)
            each = [f"{100 * (row['nll'] / row['nll_full'] - 1):.1f}" for row in mine]
            lines.append(line(f"{budget:g}", LABELS[ranking], spread(loss(mine), "{:.2f}"), *each))
    return "\n".join(
        [
            f"# {picture}",
            "",
            f"![NLL loss by budget, with and without knowing the future]({picture}.png)",
            "",
            f"{len(names)} texts, {first['prompt_tokens']} tokens read with full attention and "
            f"{first['tokens']} forced after them, as in `loadtest.quality`. Intervals: 95 %, bootstrap over "
            "texts, paired with full KV. The last columns are the losses of single texts.",
            "",
            *lines,
            "",
            "* `h2o` ranks by the attention that a key has had; the others by what it will get until the end "
            "of the text, measured with full KV. No policy can know that: between the two lies what not "
            "knowing costs, and what is left is what holding so few tokens costs.",
            "* In `loadtest/quality/reference_h2o.py`, float32, blocks of 32; half of each budget recent "
            "unless said otherwise.",
            *provenance(rows),
        ]
    )  # fmt: skip


def plot(rows: list[Row], path: Path) -> Path:
    """Loss against the budget, one line per ranking."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.9), layout="constrained")
    every = budgets(rows)
    lines = [
        Line(LABELS[it], COLOURS[it], [loss(select(rows, budget, it)) for budget in every])
        for it in rankings(rows)
    ]
    draw_lines(axis, every, lines)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_ylabel("NLL above full KV, %")
    first = rows[0]
    axis.set_title(
        f"SmolLM2-135M-Instruct, float32, {first['prompt_tokens']} + {first['tokens']} tokens, "
        f"{first['machine']}, {first['date'][:10]}",
        fontsize=8,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def loss(rows: list[Row]) -> Interval:
    """Of the mean NLL, in percent of full KV's."""
    figure = ratio([row["nll"] for row in rows], [row["nll_full"] for row in rows])
    return Interval(*(100 * (value - 1) for value in figure[:3]))


def select(rows: list[Row], budget: float, ranking: str) -> list[Row]:
    """One row per text, always in the same order."""
    mine = [row for row in rows if (row["budget"], row["ranking"]) == (budget, ranking)]
    order = list(dict.fromkeys(row["text"] for row in rows))
    return sorted(mine, key=lambda row: order.index(row["text"]))


def rankings(rows: list[Row]) -> list[str]:
    present = {row["ranking"] for row in rows}
    return [name for name in LABELS if name in present]
