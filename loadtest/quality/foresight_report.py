# SPDX-License-Identifier: Apache-2.0
"""Table and picture of what ``loadtest.quality.foresight`` measured. Drawing needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from loadtest.common.results import Row
from loadtest.common.tables import interval, markdown_table, pick, provenance
from loadtest.quality.reference_run import EMBEDDED, budgets_of, in_order, loss, percent_loss

__all__ = ["plot", "report"]

LABELS = {
    "past": "h2o",
    "future": "knows all later attention",
    "future, recent 0.1": "the same, a tenth recent",
}


def report(rows: list[Row], picture: str) -> str:
    """Markdown: one line per budget and ranking."""
    names = list(dict.fromkeys(row["text"] for row in rows))
    first = rows[0]
    lines = []
    for budget in budgets_of(rows):
        for ranking in in_order(rows, "ranking", LABELS):
            mine = _texts(rows, budget, ranking)
            each = [f"{percent_loss(row):.1f}" for row in mine]
            lines.append([f"{budget:g}", LABELS[ranking], interval(loss(mine), "{:.2f}"), *each])
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
            markdown_table(["budget", "ranked by", "NLL loss to full KV, %", *names], lines),
            "",
            "* `h2o` ranks by the attention that a key has had; the others by what it will get until the end "
            "of the text, measured with full KV. No policy can know that: between the two lies what not "
            "knowing costs, and what is left is what holding so few tokens costs.",
            "* In `tests/reference/h2o.py`, float32, blocks of 32; half of each budget recent "
            "unless said otherwise.",
            *provenance(rows),
        ]
    )


def plot(rows: list[Row], path: Path) -> Path:
    """Loss against the budget, one line per ranking."""
    from loadtest.common import plots

    colours = dict(zip(LABELS, (plots.RED, plots.BLUE, plots.YELLOW), strict=True))
    every = budgets_of(rows)
    curves = [
        plots.Curve(
            LABELS[name], colours[name], [loss(_texts(rows, budget, name)) for budget in every]
        )
        for name in in_order(rows, "ranking", LABELS)
    ]
    figure, (axis,) = plots.panels(size=(6.5, 3.9))
    plots.budget_axis(axis, every, curves)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_ylabel("NLL above full KV, %")
    plots.legend(axis)
    lengths = f"{rows[0]['prompt_tokens']} + {rows[0]['tokens']} tokens"
    return plots.save(figure, path, plots.caption(rows[0], EMBEDDED, "float32", lengths))


def _texts(rows: list[Row], budget: float, ranking: str) -> list[Row]:
    """One row per text, always in the same order."""
    order = list(dict.fromkeys(row["text"] for row in rows))
    mine = pick(rows, budget=budget, ranking=ranking)
    return sorted(mine, key=lambda row: order.index(row["text"]))
