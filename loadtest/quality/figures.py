# SPDX-License-Identifier: Apache-2.0
"""Rows to numbers: for each metric, line and budget a figure with its interval. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from loadtest.common.statistics import Estimate, mean, ratio
from loadtest.quality.lines import AGAIN, FULL
from loadtest.quality.measures import Metric
from loadtest.quality.rows import Row, latest

Values = dict[str, float]
"""A metric's value by sample."""


@dataclass(frozen=True)
class Figures:
    """Numbers of a file.

    Attributes:
        rows: one per line, budget, measure and sample.
    """

    rows: Sequence[Row]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Figures:
        """Of several rows for the same thing the last counts."""
        return cls(list(latest(rows).values()))

    @cached_property
    def _groups(self) -> dict[tuple[str, str, float], list[Row]]:
        groups: dict[tuple[str, str, float], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.measure, row.line, row.budget), []).append(row)
        return groups

    @property
    def lines(self) -> list[str]:
        """Full KV's first, then as measured."""
        names = dict.fromkeys(row.line for row in self.rows)
        first = [name for name in (FULL.line.name, AGAIN.line.name) if name in names]
        return [*first, *sorted(name for name in names if name not in first)]

    @property
    def budgets(self) -> list[float]:
        """Ascending."""
        return sorted({row.budget for row in self.rows})

    @property
    def measures(self) -> set[str]:
        """Which were measured."""
        return {row.measure for row in self.rows}

    def values(self, measure: str, key: str, line: str, budget: float) -> Values:
        """Of the samples that have the metric."""
        rows = self._groups.get((measure, line, budget), [])
        return {row.sample: row.values[key] for row in rows if key in row.values}

    def figure(self, measure: str, metric: Metric, line: str, budget: float) -> Estimate | None:
        """One cell, scaled as it is printed; ``None`` where nothing was measured."""
        values = self.values(measure, metric.key, line, budget)
        if not values:
            return None
        if metric.shown == "mean":
            return mean(list(values.values())).scaled(metric.scale)
        base = self.values(measure, metric.key, FULL.line.name, FULL.budget)
        both = [sample for sample in values if sample in base]
        if not both:
            return None
        found = ratio([values[name] for name in both], [base[name] for name in both])
        return found.shifted(-1 if metric.shown == "loss" else 0).scaled(metric.scale)

    def held(self, measure: str, line: str, budget: float) -> float | None:
        """Median of tokens held over tokens seen, at the end of the requests."""
        shares = [row.held for row in self._groups.get((measure, line, budget), [])]
        return statistics.median(shares) if shares else None
