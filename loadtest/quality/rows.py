# SPDX-License-Identifier: Apache-2.0
"""The file of results: JSON lines, written as they come, so that an interrupted run can go on.

One ``{"kind": "run", ...}`` per run with what the numbers have to be read with, then one
``{"kind": "sample", ...}`` per line, budget, measure and sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Key", "Row", "Writer", "latest", "read_rows"]

Key = tuple[str, float, str, str]
"""Line, budget, measure, sample."""


@dataclass(frozen=True)
class Row:
    """One sample under one policy and budget.

    Attributes:
        line, budget, measure, sample: what was measured.
        values: its figures by metric.
        held: KV tokens held at the end over tokens seen, by the server's report.
        about: what kind of sample it is; the output's text if that was asked for.
    """

    line: str
    budget: float
    measure: str
    sample: str
    values: dict[str, float]
    held: float
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return (self.line, self.budget, self.measure, self.sample)

    def to_json(self) -> dict[str, Any]:
        """As it is written: six significant digits tell more than the measurement knows."""
        values = {key: float(f"{value:.6g}") for key, value in self.values.items()}
        return {"kind": "sample", **asdict(self), "values": values, "held": round(self.held, 4)}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Row:
        """The inverse of :meth:`to_json`."""
        return cls(**{key: value for key, value in row.items() if key != "kind"})


class Writer:
    """Appends to a file, line by line; makes its directory."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that was killed may have left half a line: it must not swallow the next one.
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
        self._file = path.open("a", buffering=1)
        if torn:
            self._file.write("\n")

    def run(self, about: dict[str, Any]) -> None:
        """What the rows after it have to be read with."""
        self._write({"kind": "run", **about})

    def row(self, row: Row) -> None:
        """One sample."""
        self._write(row.to_json())

    def close(self) -> None:
        self._file.close()

    def _write(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")) + "\n")


def read_rows(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[Row]]:
    """The runs and the samples in files, in order. Of a line that was cut off nothing is taken.

    Raises:
        ValueError: a whole line is neither a run nor a sample.
    """
    runs: list[dict[str, Any]] = []
    rows: list[Row] = []
    for path in paths:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(text)
            except json.JSONDecodeError:
                continue
            kind = row.get("kind") if isinstance(row, dict) else None
            if kind == "run":
                runs.append(row)
            elif kind == "sample":
                rows.append(Row.of(row))
            else:
                raise ValueError(f"{path}:{number}: neither a run nor a sample")
    return runs, rows


def latest(rows: Sequence[Row]) -> dict[Key, Row]:
    """Rows by key; of several the last."""
    return {row.key: row for row in rows}
