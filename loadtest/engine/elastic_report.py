# SPDX-License-Identifier: Apache-2.0
"""Table and picture of rows about elastic budgets. The picture needs matplotlib (extra ``loadtest``)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from loadtest.common.results import Row
from loadtest.common.tables import Column, markdown_table, median_range, pick, provenance
from loadtest.engine.elastic_traffic import VARIANTS

__all__ = ["lost", "markdown", "plot_elastic"]

BASELINE = "stock"

COLUMNS = (
    Column("tok/s", lambda row: row["tok_per_s"], "{:.1f}"),
    Column("first token p50 s", lambda row: row["first_token_s"]["p50"], "{:.1f}"),
    Column("running", lambda row: row["running_mean"], "{:.1f}"),
    Column("preempt.", lambda row: row["preemptions"], "{:.0f}"),
    Column("lossless", lambda row: 100 * row["lossless"], "{:.0f} %"),
)


def lost(rows: list[Row], load: int, variant: str) -> list[float]:
    """Likelihood lost against stock vLLM on the same texts, in percent of its NLL; a value per round."""
    return [100 * (ratio - 1) for ratio in over_stock(rows, load, variant, "nll")]


def over_stock(rows: list[Row], load: int, variant: str, name: str) -> list[float]:
    """A figure over stock vLLM's in the same round; a value per round."""
    stock = {row["round"]: row[name] for row in pick(rows, load=load, variant=BASELINE)}
    return [
        row[name] / stock[row["round"]]
        for row in pick(rows, load=load, variant=variant)
        if row["round"] in stock
    ]


def markdown(rows: list[Row]) -> str:
    """All of it."""
    lines = []
    for load in loads(rows):
        for variant in VARIANTS:
            found = pick(rows, load=load, variant=variant)
            if found:
                cells = [column.median(found) for column in COLUMNS]
                cells.insert(1, median_range(over_stock(rows, load, variant, "tok_per_s"), 2))
                cells.append(median_range(lost(rows, load, variant), 1))
                lines.append([str(load), VARIANTS[variant].label, *cells])
    heads = [column.head for column in COLUMNS]
    head = ["texts at once", "by", heads[0], "over stock", *heads[1:], "likelihood lost, %"]
    first = rows[0]
    about = "compiled" if not first["eager"] else "eager"
    parts = [
        "# Elastic budgets under rising load",
        "",
        *provenance(rows),
        f"{first['dtype']}, {about}; a pool of 6,400 tokens. Ratios and losses are taken within a round, on "
        "the same texts; of several rounds the median (smallest-largest).",
        "",
        markdown_table(head, lines),
        "",
    ]
    return "\n".join(parts)


def loads(rows: list[Row]) -> list[int]:
    """Those that were measured."""
    return sorted({row["load"] for row in rows})


def plot_elastic(rows: list[Row], path: Path) -> Path:
    """Speed, likelihood lost and lossless answers over the load, a line per variant."""
    from loadtest.common.plots import (
        BLUE,
        GREY,
        LIGHT,
        RED,
        YELLOW,
        caption,
        legend,
        log_ticks,
        panels,
        save,
    )

    colours = dict(zip(VARIANTS, (GREY, BLUE, LIGHT, RED, YELLOW), strict=True))
    shown: tuple[tuple[str, Callable[[int, str], list[float]]], ...] = (
        ("generated tokens / s", lambda n, v: [r["tok_per_s"] for r in pick(rows, load=n, variant=v)]),
        ("likelihood lost, % of full KV's NLL", lambda n, v: lost(rows, n, v)),
        ("lossless answers, %", lambda n, v: [100 * r["lossless"] for r in pick(rows, load=n, variant=v)]),
    )  # fmt: skip
    figure, axes = panels(len(shown), size=(13, 4))
    for axis, (title, values) in zip(axes, shown, strict=True):
        for variant, about in VARIANTS.items():
            points = [
                (n, statistics.median(found)) for n in loads(rows) if (found := values(n, variant))
            ]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", markersize=4, color=colours[variant],
                          label=about.label)  # fmt: skip
        log_ticks(axis, loads(rows), "texts of 1,000 + 512 tokens at once")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
    legend(axes[0])
    return save(figure, path, caption(rows[0], "SmolLM2-135M-Instruct", "pool of 6,400 tokens"))
