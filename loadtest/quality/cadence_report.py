# SPDX-License-Identifier: Apache-2.0
"""Table and picture of what ``loadtest.quality.cadence`` measured. Drawing needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from loadtest.common.results import Row
from loadtest.common.statistics import difference, mean
from loadtest.common.tables import interval, markdown_table, pick, provenance
from loadtest.quality.reference_run import EMBEDDED, budgets_of, in_order, percent_loss

__all__ = ["plot", "report"]

LABELS = {
    "token": "one token (paper)",
    "block-16": "blocks of 16",
    "block-32": "blocks of 32",
    "block-32-exact-window": "blocks of 32, window exact",
}
HEAD = (
    "budget", "evicted at a time", "NLL", "loss to full KV, %", "NLL against the paper's cadence",
    "tokens held", "Jaccard", "paper's set kept, %", "of its heavy hitters, %",
)  # fmt: skip


def report(rows: list[Row], picture: str) -> str:
    """Markdown: how the numbers came about, and one line per budget and cadence."""
    texts = {row["text"]: row["nll_full"] for row in rows}
    first = rows[0]
    lines = [
        _line(rows, budget, cadence)
        for budget in budgets_of(rows)
        for cadence in in_order(rows, "variant", LABELS)
    ]
    return "\n".join(
        [
            f"# {picture}",
            "",
            f"![NLL loss and overlap of the kept sets by budget]({picture}.png)",
            "",
            f"NLL of {len(texts)} texts of real English, {first['prompt_tokens']} tokens read with full "
            f"attention and {first['tokens']} forced after them; full KV: "
            f"{statistics.fmean(texts.values()):.4f}. Intervals: "
            "95 %, bootstrap over texts, paired where two cadences are compared.",
            "",
            markdown_table(HEAD, lines),
            "",
            *_notes(rows),
            *provenance(rows),
        ]
    )


def _line(rows: list[Row], budget: float, cadence: str) -> list[str]:
    mine, paper = _texts(rows, budget, cadence), _texts(rows, budget, "token")
    line = [
        f"{budget:g}",
        LABELS[cadence],
        f"{_mean(mine, 'nll'):.4f}",
        interval(mean(list(map(percent_loss, mine))), "{:.2f}"),
    ]
    if cadence == "token":
        return [*line, "", f"{_mean(mine, 'held'):.0f}", "", "", ""]
    apart = difference([row["nll"] for row in mine], [row["nll"] for row in paper])
    return [
        *line,
        interval(apart, "{:+.4f}"),
        f"{_mean(mine, 'held'):.0f}",
        interval(mean([row["jaccard"] for row in mine]), "{:.3f}"),
        f"{100 * _mean(mine, 'covered'):.1f}",
        f"{100 * _mean(mine, 'covered_heavy'):.1f}",
    ]


def _notes(rows: list[Row]) -> list[str]:
    least = budgets_of(rows)[0]
    by_text = ", ".join(f"{percent_loss(row):.1f}" for row in _texts(rows, least, "token"))
    return [
        "* The paper evicts a token for each that comes. We evict a block once a block is in excess, so "
        "that up to a block less one is held beyond the budget, and let the recent window begin at the "
        'nearest block. "window exact" has the first effect and not the second.',
        "* Kept sets are compared after the last forced token, per layer and KV head. A Jaccard of 1 "
        'is out of reach where more tokens are held than the budget; "paper\'s set kept" is not bounded '
        'by that. "Heavy hitters" are its tokens that are older than our recent window.',
        "* Both cadences run in `tests/reference/h2o.py`, in float32; no engine takes part. "
        "No floor (`--kv-min-tokens`), half of each budget recent.",
        f"* Loss by text, at the paper's cadence and budget {least:g}: {by_text} %. Where a text repeats "
        "itself word for word, as Python's documentation does in places, full KV copies, and eviction "
        "has lost what to copy from.",
    ]


def plot(rows: list[Row], path: Path) -> Path:
    """Loss and overlap against the budget, one line per cadence."""
    from loadtest.common import plots

    colours = dict(zip(LABELS, (plots.GREY, plots.BLUE, plots.RED, plots.YELLOW), strict=True))
    every, cadences = budgets_of(rows), in_order(rows, "variant", LABELS)

    def curves(names: Iterable[str], value: Callable[[Row], float]) -> list[plots.Curve]:
        return [
            plots.Curve(LABELS[name], colours[name],
                  [mean(list(map(value, _texts(rows, budget, name)))) for budget in every])
            for name in names
        ]  # fmt: skip

    figure, (losses, overlaps) = plots.panels(2, size=(9.5, 3.9))
    plots.budget_axis(losses, every, curves(cadences, percent_loss))
    losses.axhline(0, color="black", linewidth=0.8)
    losses.set_ylabel("NLL above full KV, %")
    compared = [name for name in cadences if name != "token"]
    plots.budget_axis(overlaps, every, curves(compared, lambda row: float(row["jaccard"])))
    overlaps.set_ylabel("Jaccard with the paper's kept set")
    overlaps.set_ylim(0, 1.02)
    plots.legend(losses)
    plots.legend(overlaps)
    lengths = f"{rows[0]['prompt_tokens']} + {rows[0]['tokens']} tokens"
    return plots.save(
        figure, path, plots.caption(rows[0], EMBEDDED, "float32", lengths, "95 % intervals")
    )


def _texts(rows: Iterable[Row], budget: float, cadence: str) -> list[Row]:
    """One row per text, in the order of texts."""
    return sorted(pick(rows, budget=budget, variant=cadence), key=lambda row: int(row["text"]))


def _mean(rows: Iterable[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)
