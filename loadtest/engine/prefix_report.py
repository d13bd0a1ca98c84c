# SPDX-License-Identifier: Apache-2.0
"""Tables and picture of rows about shared beginnings. The picture needs matplotlib (extra ``loadtest``)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from loadtest.common.results import Row
from loadtest.common.tables import Column, markdown_table, median_range, pick, provenance
from loadtest.engine.prefix_traffic import SETTINGS, TRAFFIC, VARIANTS

__all__ = ["markdown", "plot_prefix"]


def first_token(row: Row) -> float:
    """Median seconds from a question to the first token of its answer."""
    return float(row["first_token_s"]["p50"])


COLUMNS = (
    Column("tok/s", lambda row: row["tok_per_s"], "{:.1f}"),
    Column("first token p50 s", first_token, "{:.2f}"),
    Column("p99", lambda row: row["first_token_s"]["p99"], "{:.2f}"),
    Column("peak blocks", lambda row: row["blocks_peak"], "{:.0f}"),
    Column("in tokens", lambda row: row["tokens_peak"], "{:.0f}"),
    Column("cached", lambda row: 100 * row["cached_share"], "{:.0f} %"),
    Column("running", lambda row: row["running_mean"], "{:.1f}"),
    Column("preempt.", lambda row: row["preemptions"], "{:.0f}"),
)

RATIOS: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("tok/s", lambda row: row["tok_per_s"]),
    ("first token", first_token),
    ("peak memory", lambda row: row["tokens_peak"]),
)


def markdown(rows: list[Row]) -> str:
    """All of it: medians over the rounds, and ratios within a round."""
    parts = [
        "# Shared beginnings: kv_protect against vLLM's prefix cache",
        "",
        *provenance(rows),
        *(f"* {traffic.name}: {traffic.what}" for traffic in TRAFFIC.values()),
        "",
        measured_table(rows),
        "",
        "Ratios are taken within a round: median (smallest-largest).",
        "",
        ratio_table(rows),
        "",
    ]
    return "\n".join(parts)


def measured_table(rows: list[Row]) -> str:
    """Medians over the rounds."""
    lines = []
    for memory, traffic in _cases(rows):
        for variant in VARIANTS:
            found = pick(rows, memory=memory, traffic=traffic, variant=variant)
            if found:
                cells = [column.median(found) for column in COLUMNS]
                lines.append([traffic, memory, VARIANTS[variant].label, *cells])
    return markdown_table(["traffic", "memory", "by", *(c.head for c in COLUMNS)], lines)


def ratio_table(rows: list[Row]) -> str:
    """Ours over each other variant of the same round."""
    lines = []
    for memory, traffic in _cases(rows):
        ours = {
            row["round"]: row for row in pick(rows, memory=memory, traffic=traffic, variant="h2o")
        }
        for variant in VARIANTS:
            pairs = [
                (ours[row["round"]], row)
                for row in pick(rows, memory=memory, traffic=traffic, variant=variant)
                if variant != "h2o" and row["round"] in ours
            ]
            if pairs:
                cells = [median_range([of(own) / of(base) for own, base in pairs], 2)
                         for _, of in RATIOS]  # fmt: skip
                lines.append([traffic, memory, VARIANTS[variant].label, *cells])
    return markdown_table(["traffic", "memory", "kv_protect over", *(n for n, _ in RATIOS)], lines)


def _cases(rows: list[Row]) -> list[tuple[str, str]]:
    there = {(row["memory"], row["traffic"]) for row in rows}
    return [(m, t) for t in TRAFFIC for m in SETTINGS if (m, t) in there]


def plot_prefix(rows: list[Row], path: Path) -> Path:
    """Tokens per second and first token of each case and variant: median, with every round as a dot."""
    from loadtest.common.plots import COLOURS, LIGHT, caption, legend, panels, save

    grey, red, blue, yellow, green, *_ = COLOURS
    colours = dict(zip(VARIANTS, (LIGHT, grey, yellow, green, blue, red), strict=True))
    cases = _cases(rows)
    variants = [v for v in VARIANTS if any(row["variant"] == v for row in rows)]
    figure, axes = panels(rows=2, size=(2 + 1.6 * len(cases), 7))
    width = 0.8 / len(variants)
    for axis, (title, of) in zip(axes, RATIOS[:2], strict=True):
        for offset, variant in enumerate(variants):
            place = (offset - (len(variants) - 1) / 2) * width
            found = {
                at: [of(row) for row in pick(rows, memory=m, traffic=t, variant=variant)]
                for at, (m, t) in enumerate(cases)
            }
            there = [at for at in found if found[at]]
            heights = [statistics.median(found[at]) for at in there]
            axis.bar([at + place for at in there], heights, width * 0.92, color=colours[variant],
                     label=VARIANTS[variant].label)  # fmt: skip
            dots = [(at + place, value) for at in there for value in found[at]]
            axis.plot(*zip(*dots, strict=True), "k.", markersize=3)
        axis.set_xticks(range(len(cases)), [f"{t}\n{m} memory" for m, t in cases])
        axis.set_ylabel({"tok/s": "generated tokens / s"}.get(title, "median first token, s"))
    legend(axes[0])
    return save(figure, path, caption(rows[0], "SmolLM2-135M-Instruct", "bf16", "kv_budget 0.2"))
