# SPDX-License-Identifier: Apache-2.0
"""Files of results: JSON lines, a row as soon as it is measured, so that an interrupted run can go on."""

import datetime
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(os.path.relpath(Path(__file__).parents[1] / "results"))
"""The published ones; also where new ones go unless told otherwise. Relative: ``--help`` shows it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One measurement of a plan: its fields are repeated by its row."""

    def measured_by(self, row: Row) -> bool:
        """Whether ``row`` is its result."""
        return all(row[name] == value for name, value in asdict(self).items())


def result_path(kind: str, folder: Path = RESULTS, name: str | None = None) -> Path:
    """``NAME.jsonl`` in ``folder``; without a name ``KIND-DATE-TIME.jsonl``, UTC."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M%S")
    return folder / f"{name or f'{kind}-{stamp}'}.jsonl"


def publish(path: Path, text: str) -> None:
    """Write ``text`` as Markdown beside the rows in ``path``, and print it and where the rows are."""
    path.with_suffix(".md").write_text(text)
    print(f"\n{text}\nrows: {path}")


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows, making the folder. A line that a killed run left unfinished swallows none of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.writelines(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


def numbered_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Line numbers and rows. Of a line that was cut off nothing is taken.

    Raises:
        ValueError: a whole line is no object.
    """
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not an object")  # noqa: TRY004 - the file's fault
        yield number, row


def read_rows(path: Path) -> list[Row]:
    """All rows; none if there is no such file. Raises what :func:`numbered_rows` raises."""
    return [row for _, row in numbered_rows(path)] if path.exists() else []
