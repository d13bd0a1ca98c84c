# SPDX-License-Identifier: Apache-2.0
"""The file of results: JSON lines, written as they come, so that an interrupted run can go on.

One ``{"kind": "run", ...}`` per run with what the numbers have to be read with, then one
``{"kind": "sample", ...}`` per line, budget, measure and sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.common.results import numbered_rows

Key = tuple[str, float, str, str]
"""Line, budget, measure, sample."""


@dataclass(frozen=True)
class Row:
    """One sample under one policy and budget.

    Attributes:
        line, budget, measure, sample: what was measured.
        values: its figures by metric.
        held: KV tokens held at the end over tokens seen, by the server's report.
        description: what kind of sample it is (``about`` in the file); the output's text if that was wanted.
    """

    line: str
    budget: float
    measure: str
    sample: str
    values: dict[str, float]
    held: float
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What was measured."""
        return (self.line, self.budget, self.measure, self.sample)

    def to_json(self) -> dict[str, Any]:
        """As it is written: six significant digits tell more than the measurement knows."""
        row = {"kind": "sample", **asdict(self)}
        row["about"] = row.pop("description")
        row["values"] = {key: float(f"{value:.6g}") for key, value in self.values.items()}
        return {**row, "held": round(self.held, 4)}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Row:
        """The inverse of :meth:`to_json`."""
        values = {key: value for key, value in row.items() if key not in ("kind", "about")}
        return cls(**values, description=row.get("about", {}))


def read_rows(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[Row]]:
    """The runs and the samples in files, in order. Of a line that was cut off nothing is taken.

    Raises:
        ValueError: a whole line is neither a run nor a sample.
    """
    runs: list[dict[str, Any]] = []
    rows: list[Row] = []
    for path in paths:
        for number, row in numbered_rows(path):
            if row.get("kind") == "run":
                runs.append(row)
            elif row.get("kind") == "sample":
                rows.append(Row.of(row))
            else:
                raise ValueError(f"{path}:{number}: neither a run nor a sample")
    return runs, rows


def latest(rows: Sequence[Row]) -> dict[Key, Row]:
    """Rows by key; of several the last."""
    return {row.key: row for row in rows}
