# SPDX-License-Identifier: Apache-2.0
"""Table and picture of what ``loadtest.quality.cadence`` measured. Drawing needs matplotlib (test tools)."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Interval", "Line", "bootstrap", "draw_lines", "plot", "provenance", "report"]

Row = dict[str, Any]

LABELS = {
    "token": "one token (paper)",
    "block-16": "blocks of 16",
    "block-32": "blocks of 32",
    "block-32-exact-window": "blocks of 32, window exact",
}
COLOURS = {
    "token": "#6f6f6f",
    "block-16": "#2e6f95",
    "block-32": "#d1495b",
    "block-32-exact-window": "#e0a030",
}


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


class Line(NamedTuple):
    """A line of a picture: an interval for each budget."""

    label: str
    colour: str
    found: list[Interval]


def bootstrap(values: Sequence[float], resamples: int = 10_000) -> Interval:
    """Over texts, which are what is drawn at random: a text's tokens depend on each other."""
    chance = random.Random(0)
    means = sorted(
        statistics.fmean(chance.choices(values, k=len(values))) for _ in range(resamples)
    )
    low, high = means[round(0.025 * resamples)], means[round(0.975 * resamples) - 1]
    return Interval(statistics.fmean(values), low, high)


def report(rows: list[Row], picture: str) -> str:
    """Markdown: how the numbers came about, and one line per budget and cadence."""
    texts = len({row["text"] for row in rows})
    head = (
        "budget", "evicted at a time", "NLL", "loss to full KV, %", "NLL against the paper's cadence",
        "tokens held", "Jaccard", "paper's set kept, %", "of its heavy hitters, %",
    )  # fmt: skip
    lines = [line(*head), "|" + "---|" * len(head)]
    for budget in budgets(rows):
        for variant in variants(rows):
            mine = select(rows, budget, variant)
            paper = select(rows, budget, "token")
            apart = [ours["nll"] - its["nll"] for ours, its in zip(mine, paper, strict=True)]
            same = variant == "token"
            lines.append(
                line(
                    f"{budget:g}",
                    LABELS[variant],
                    f"{mean_of(mine, 'nll'):.4f}",
                    spread(bootstrap([loss(row) for row in mine]), "{:.2f}"),
                    "" if same else spread(bootstrap(apart), "{:+.4f}"),
                    f"{mean_of(mine, 'held'):.0f}",
                    "" if same else spread(bootstrap([row["jaccard"] for row in mine]), "{:.3f}"),
                    "" if same else f"{100 * mean_of(mine, 'covered'):.1f}",
                    "" if same else f"{100 * mean_of(mine, 'covered_heavy'):.1f}",
                )
            )
    first, least = rows[0], budgets(rows)[0]
    by_text = ", ".join(f"{loss(row):.1f}" for row in select(rows, least, "token"))
    return "\n".join(
        [
            f"# {picture}",
            "",
            f"![NLL loss and overlap of the kept sets by budget]({picture}.png)",
            "",
            f"NLL of {texts} texts of real English, {first['prompt_tokens']} tokens read with full "
            f"attention and {first['tokens']} forced after them; full KV: {full(rows):.4f}. Intervals: "
            "95 %, bootstrap over texts, paired where two cadences are compared.",
            "",
            *lines,
            "",
            "* The paper evicts a token for each that comes. We evict a block once a block is in excess, so "
            "that up to a block less one is held beyond the budget, and let the recent window begin at the "
            'nearest block. "window exact" has the first effect and not the second.',
            "* Kept sets are compared after the last forced token, per layer and KV head. A Jaccard of 1 "
            "is out of reach where more tokens are held than the budget; \"paper's set kept\" is not bounded "
            'by that. "Heavy hitters" are its tokens that are older than our recent window.',
            "* Both cadences run in `loadtest/quality/reference_h2o.py`, in float32; no engine takes part. "
            "No floor (`--kv-min-tokens`), half of each budget recent.",
            f"* Loss by text, at the paper's cadence and budget {least:g}: {by_text} %. Where a text repeats "
            "itself word for word, as Python's documentation does in places, full KV copies, and eviction "
            "has lost what to copy from.",
            *provenance(rows),
        ]
    )  # fmt: skip


def plot(rows: list[Row], path: Path) -> Path:
    """Loss and overlap against the budget, one line per cadence."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 3.9), layout="constrained")
    draw(axes[0], rows, variants(rows), loss)
    axes[0].axhline(0, color="black", linewidth=0.8)
    axes[0].set_ylabel("NLL above full KV, %")
    compared = [variant for variant in variants(rows) if variant != "token"]
    draw(axes[1], rows, compared, lambda row: float(row["jaccard"]))
    axes[1].set_ylabel("Jaccard with the paper's kept set")
    axes[1].set_ylim(0, 1.02)
    first = rows[0]
    figure.suptitle(
        f"SmolLM2-135M-Instruct, float32, {first['prompt_tokens']} + {first['tokens']} tokens, "
        f"95 % intervals, {first['machine']}, {first['date'][:10]}",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def draw(axis: Any, rows: list[Row], names: list[str], value: Callable[[Row], float]) -> None:
    """``value`` at each budget, with its interval."""
    lines = [
        Line(LABELS[name], COLOURS[name],
             [bootstrap([value(row) for row in select(rows, b, name)]) for b in budgets(rows)])
        for name in names
    ]  # fmt: skip
    draw_lines(axis, budgets(rows), lines)


def draw_lines(axis: Any, every: list[float], lines: list[Line]) -> None:
    """Lines over the budgets ``every``, on a logarithmic axis."""
    for place, (label, colour, found) in enumerate(lines):
        # Beside each other, so that intervals can be told apart.
        where = [budget * 1.03 ** (place - (len(lines) - 1) / 2) for budget in every]
        errors = [[it.mean - it.low for it in found], [it.high - it.mean for it in found]]
        axis.errorbar(
            where, [it.mean for it in found], yerr=errors, marker="o", markersize=4, capsize=3,
            color=colour, label=label, linewidth=1.3,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xticks(every, [f"{budget:g}" for budget in every])
    axis.minorticks_off()
    axis.set_xlabel("kv_budget")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def provenance(rows: list[Row]) -> list[str]:
    """Where the numbers come from, a Markdown list."""
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return [
        f"* command: {commands(rows)}",
        f"* machine: {first['machine']}",
        f"* versions: {versions}",
        f"* commit: {', '.join(sorted({row['commit'] for row in rows}))}",
        f"* date: {min(row['date'] for row in rows)}",
        "",
    ]


def select(rows: Iterable[Row], budget: float, variant: str) -> list[Row]:
    """One row per text, in the order of texts."""
    mine = [row for row in rows if (row["budget"], row["variant"]) == (budget, variant)]
    return sorted(mine, key=lambda row: int(row["text"]))


def loss(row: Row) -> float:
    """How much worse than with full KV the text was predicted, in percent of its NLL."""
    return 100 * (float(row["nll"]) / float(row["nll_full"]) - 1)


def budgets(rows: Iterable[Row]) -> list[float]:
    return sorted({row["budget"] for row in rows})


def variants(rows: Iterable[Row]) -> list[str]:
    present = {row["variant"] for row in rows}
    return [name for name in LABELS if name in present]


def mean_of(rows: Iterable[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def full(rows: Iterable[Row]) -> float:
    return statistics.fmean({row["text"]: row["nll_full"] for row in rows}.values())


def commands(rows: Iterable[Row]) -> str:
    return "; ".join(f"`{command}`" for command in dict.fromkeys(row["command"] for row in rows))


def spread(found: Interval, style: str) -> str:
    mean, low, high = (style.format(value) for value in found)
    return f"{mean} ({low} to {high})"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
