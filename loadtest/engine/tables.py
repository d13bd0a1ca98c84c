# SPDX-License-Identifier: Apache-2.0
"""Tables of benchmark rows: what was measured, and how it compares within a round."""

from collections.abc import Callable

from loadtest.common.results import Row
from loadtest.common.tables import Column, markdown_table, median_range, pick
from loadtest.engine.suites import Suite


def decode_ms(row: Row) -> float:
    """Milliseconds per decode step at the largest batch that ran often enough to tell."""
    steps = row["decode_ms"]
    return float(steps[max(steps, key=int)]) if steps else float("nan")


NOTHING = float("nan")
"""Where a row lacks a figure: not measured, or written before there was one."""

COLUMNS = (
    Column("tok/s", lambda row: row["tok_per_s"], "{:.1f}"),
    Column("running", lambda row: row["running_mean"], "{:.1f}"),
    Column("max", lambda row: row["running_max"], "{:.0f}"),
    Column("preempt.", lambda row: row["preemptions"], "{:.0f}"),
    Column("accepted", lambda row: 100 * row.get("accepted", NOTHING), "{:.0f} %"),
    Column("blocks mean", lambda row: row["blocks_mean"], "{:.0f}"),
    Column("peak", lambda row: row["blocks_peak"], "{:.0f}"),
    Column("prompts s", lambda row: row["prompts_s"], "{:.1f}"),
    Column("decode step ms", decode_ms, "{:.2f}"),
    Column("TTFT p50 s", lambda row: row["ttft_s"]["p50"], "{:.2f}"),
    Column("p99", lambda row: row["ttft_s"]["p99"], "{:.2f}"),
    Column("ITL p50 ms", lambda row: row["itl_s"]["p50"] * 1e3, "{:.1f}"),
    Column("p99", lambda row: row["itl_s"]["p99"] * 1e3, "{:.1f}"),
    Column("cached", lambda row: 100 * row.get("cached_share", NOTHING), "{:.0f} %"),
    Column("lossless", lambda row: 100 * row.get("lossless", NOTHING), "{:.0f} %"),
    Column("RSS MiB", lambda row: row["peak_rss_mib"], "{:.0f}"),
    Column("start s", lambda row: row["start_s"], "{:.0f}"),
)

RATIOS: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("tok/s", lambda row: row["tok_per_s"]),
    ("decode step", decode_ms),
    ("prompts", lambda row: row["prompts_s"]),
    ("first token", lambda row: row["ttft_s"]["p50"]),
    ("ITL p99", lambda row: row["itl_s"]["p99"]),
    ("peak blocks", lambda row: row["blocks_peak"]),
    ("NLL", lambda row: row.get("nll", NOTHING)),
)


def measured_table(rows: list[Row]) -> str:
    """Medians over the rounds, per workload and variant. Markdown."""
    groups = dict.fromkeys((row["workload"], row["variant"]) for row in rows)
    head = ["workload", "variant", *(column.head for column in COLUMNS)]
    return markdown_table(
        head,
        (
            [workload, variant,
             *(column.median(pick(rows, workload=workload, variant=variant)) for column in COLUMNS)]
            for workload, variant in groups
        ),
    )  # fmt: skip


def ratio_table(rows: list[Row], suite: Suite) -> str:
    """Ours over each baseline of the same round: median (smallest-largest). Markdown.

    What serves without budgets was measured once per traffic. Full KV on our kernel stands on both sides.
    """
    lines = []
    served = dict.fromkeys((row["workload"], row["variant"]) for row in rows)
    for workload, own in sorted(served, key=lambda one: one[1] != "h2o"):
        before = suite.variants[: suite.variants.index(own)] if own in suite.own else ()
        for variant in before:
            pairs = _pairs(rows, suite, workload, own, variant)
            if pairs:
                cells = [median_range([of(own) / of(base) for own, base in pairs], 2)
                         for _, of in RATIOS]  # fmt: skip
                same = sum(own["tokens_hash"] == base["tokens_hash"] for own, base in pairs)
                lines.append([workload, own, variant, *cells, f"{same} of {len(pairs)}"])
    head = ["workload", "ours", "over", *(name for name, _ in RATIOS), "same tokens"]
    return markdown_table(head, lines)


def measured(rows: list[Row], suite: Suite, workload: str, variant: str) -> list[Row]:
    """The rows that tell how ``variant`` serves ``workload``, its twin's if it has one."""
    mine = pick(rows, workload=workload, variant=variant)
    if mine or suite.has_budgets(variant):
        return mine
    traffic = suite.workloads[workload].traffic
    return [
        row
        for row in pick(rows, variant=variant)
        if suite.workloads[row["workload"]].traffic == traffic
    ]


def _pairs(
    rows: list[Row], suite: Suite, workload: str, own: str, variant: str
) -> list[tuple[Row, Row]]:
    baseline = {row["round"]: row for row in measured(rows, suite, workload, variant)}
    return [
        (row, baseline[row["round"]])
        for row in pick(rows, workload=workload, variant=own)
        if row["round"] in baseline
    ]
