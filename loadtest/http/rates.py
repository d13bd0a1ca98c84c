# SPDX-License-Identifier: Apache-2.0
"""A comparison over rates: every variant at every rate, against the first variant of the same round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from loadtest.common.statistics import percentile
from loadtest.common.tables import markdown_table, median_range, number
from loadtest.http.records import ALL, Run, Summary, runs_by_variant, summarise

__all__ = ["Point", "points", "rates_of", "rates_table"]

COLUMNS = ("requests/s", "", "tok/s", "against the first", "TTFT p50 / p99 s", "TPOT p50 ms",
           "preempted", "lossless", "likelihood lost, %", "failed")  # fmt: skip


class Point:
    """One variant at one rate: a run per round, each beside the first variant's.

    Attributes:
        tok_per_s: generated tokens per second.
        ratios: the same over the first variant's.
        ttft: seconds, of all requests.
        lossless: shares of answers that lost nothing; of a server that does not say, none.
        lost: percent that the likelihood of forced answers is below the first variant's.
    """

    def __init__(self, runs: Sequence[Run], base: Sequence[Run]) -> None:
        first = {run.description["round"]: _whole(run) for run in base}
        found = {run.description["round"]: _whole(run) for run in runs}
        both = [(one, first[turn]) for turn, one in found.items() if turn in first]
        self.tok_per_s = [one.tok_per_s for one in found.values()]
        self.ratios = [one.tok_per_s / other.tok_per_s for one, other in both if other.tok_per_s]
        self.ttft = [value for one in found.values() for value in one.samples["ttft"]]
        self.tpot = [value for one in found.values() for value in one.samples["tpot"]]
        self.lossless = [one.lossless for one in found.values() if one.lossless is not None]
        self.lost = [
            100 * (one.nll / other.nll - 1)
            for one, other in both
            if one.nll is not None and other.nll is not None
        ]
        self.preemptions = [
            run.description["server"]["preemptions"]
            for run in runs
            if "preemptions" in run.description.get("server", {})
        ]
        self.failures = sum(one.failures for one in found.values())

    def cells(self, *, first: bool) -> list[str]:
        """As a row of the table."""
        ttft = " / ".join(number(percentile(self.ttft, share), 2) for share in (0.5, 0.99))
        return [
            median_range(self.tok_per_s, 1),
            "" if first else f"**{median_range(self.ratios, 2)}**",
            ttft,
            number(1000 * percentile(self.tpot, 0.5), 1),
            number(median(self.preemptions) if self.preemptions else math.nan, 0),
            f"{100 * median(self.lossless):.0f} %" if self.lossless else "-",
            "" if first or not self.lost else median_range(self.lost, 1),
            str(self.failures),
        ]


def rates_of(runs: Sequence[Run]) -> list[float]:
    """The rates that were measured, requests per second; none if the load was so many users."""
    found = {run.description.get("rate") for run in runs}
    return sorted(rate for rate in found if rate is not None)


def points(runs: Sequence[Run]) -> dict[str, dict[float, Point]]:
    """By variant, the first one first, and by rate."""
    compared = runs_by_variant(runs)
    base = next(iter(compared.values()))
    return {
        name: {
            rate: Point(mine, _at(base, rate))
            for rate in rates_of(runs)
            if (mine := _at(some, rate))
        }
        for name, some in compared.items()
    }


def rates_table(runs: Sequence[Run]) -> str:
    """Markdown: a row per rate and variant."""
    found = points(runs)
    first = next(iter(found))
    rows = [
        [f"{rate:g}", name, *some[rate].cells(first=name == first)]
        for rate in rates_of(runs)
        for name, some in found.items()
        if rate in some
    ]
    return markdown_table(COLUMNS, rows)


def _at(runs: Sequence[Run], rate: float) -> list[Run]:
    return [run for run in runs if run.description["rate"] == rate]


def _whole(run: Run) -> Summary:
    return summarise(run.records)[ALL]
