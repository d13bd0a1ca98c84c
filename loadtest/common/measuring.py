# SPDX-License-Identifier: Apache-2.0
"""Carry out a plan of measurements, a row as soon as each is made: what an interrupted run lacks, no more."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from loadtest.common.child import Child
from loadtest.common.machine import describe_run
from loadtest.common.results import Measured, Row, append_rows, read_rows

M = TypeVar("M", bound=Measured)


def missing(plan: Iterable[M], rows: Sequence[Row]) -> list[M]:
    """What of a plan no row has measured."""
    return [one for one in plan if not any(one.measured_by(row) for row in rows)]


def carry_out(
    plan: Iterable[M],
    path: Path,
    module: str,
    about: Row,
    engine_of: Callable[[M], Child],
    line: Callable[[M], str],
    shown: Callable[[M], str],
    said: Callable[[Row], str],
) -> list[Row]:
    """Measure what ``path`` lacks, appending to it; returns all rows.

    Args:
        module: the command that the rows name.
        about: what all rows say beside their measurement.
        engine_of: the process that measures it, which may have to be started.
        line: what it is asked. shown, said: what is printed before and after.
    """
    rows = read_rows(path)
    lacking = missing(plan, rows)
    for count, one in enumerate(lacking, start=1):
        engine = engine_of(one)
        print(f"[{count}/{len(lacking)}] {shown(one)}", end="", flush=True)
        row = describe_run(module) | about | asdict(one) | engine.request(line(one))
        print(f" {said(row)}", flush=True)
        rows.append(row)
        append_rows(path, [row])
    return rows
