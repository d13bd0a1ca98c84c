# SPDX-License-Identifier: Apache-2.0
"""Markdown tables, and how numbers stand in their cells."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from loadtest.common.results import Row
from loadtest.common.statistics import Estimate


class Column(NamedTuple):
    """A column of medians: its head, a row's value, and how a value is written."""

    head: str
    value: Callable[[Row], float]
    style: str

    def median(self, rows: Iterable[Row]) -> str:
        """The cell of ``rows``; ``-`` where a row lacks the figure."""
        middle = statistics.median(map(self.value, rows))
        return "-" if math.isnan(middle) else self.style.format(middle)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without a line break at its end."""
    lines = [_line(head), "|" + "---|" * len(head), *map(_line, rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float, digits: int) -> str:
    """Rounded; a dash where nothing was measured."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def median_range(values: Sequence[float], digits: int) -> str:
    """``2.10 (1.96-2.40)``: the median, and of several values the smallest and the largest."""
    if not values:
        return "-"
    middle = number(statistics.median(values), digits)
    if len(values) == 1:
        return middle
    return f"{middle} ({number(min(values), digits)}-{number(max(values), digits)})"


def interval(estimate: Estimate, style: str) -> str:
    """``2.1 (1.4 to 2.9)`` of ``{:.1f}``."""
    value, low, high = map(style.format, estimate[:3])
    return f"{value} ({low} to {high})"


def pick(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def provenance(rows: Sequence[Row]) -> list[str]:
    """Where the numbers come from, as lines of a Markdown list."""
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    commands = dict.fromkeys(row["command"] for row in rows)
    return [
        f"* command: {'; '.join(f'`{command}`' for command in commands)}",
        f"* machine: {first['machine']}",
        f"* versions: {versions}",
        f"* commit: {', '.join(sorted({row['commit'] for row in rows}))}",
        f"* date: {min(row['date'] for row in rows)}",
        "",
    ]
