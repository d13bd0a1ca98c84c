# SPDX-License-Identifier: Apache-2.0
"""Simulated against measured, on this machine: throughput and median first token of the published workloads.

    python -m loadtest.plan.validate [--dtype float32 --eager] [--cases tight mixed ...]
    python -m loadtest.plan.validate --http loadtest/results/elastic-http-....jsonl

Each engine serves the batches of a calibration, then its workloads as their own rooms do, then the batches
again; the same requests are then simulated with that calibration, on the same pool. One that was made in
another process would be wrong by what processes differ in on this machine, up to a third. ``--http`` takes
rows of ``python -m loadtest.http.compare``, recorded on a machine of this kind with the same model and dtype.
Rows and a table; ``--resume`` goes on, simulates anew what has been measured, and measures again what the
machine changed its speed under.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from h2o_vllm.models import default_model_dir
from loadtest.common.command import command_parser
from loadtest.common.results import RESULTS, Row, append_rows, publish, read_rows, result_path
from loadtest.common.tables import markdown_table, provenance
from loadtest.plan.calibrate import add_engine_options

__all__ = ["TARGETS", "errors_table", "main"]

TARGETS = {"tok_per_s": 0.15, "first_token_s": 0.25}
"""How far a simulation may be from what was measured, relative."""

MAX_DRIFT = TARGETS["tok_per_s"]
"""Share by which the batches behind a case may differ in time from those before it: beyond, nobody knows how
fast the machine was meanwhile."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, simulate, publish."""
    args = parse_arguments(argv)
    # Of the simulated engines; those that are measured log in processes of their own.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    path = args.resume or result_path("plan-validation", args.out)
    rows = again(read_rows(path))
    if rows:
        print(errors_table(rows), flush=True)
        path.write_text("")
        append_rows(path, rows)
    for row in itertools.chain(compared(args, rows), replayed(args, rows)):
        rows.append(row)
        append_rows(path, [row])
        print(errors_table([row]).splitlines()[-1], flush=True)
    publish(path, markdown(rows))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    from loadtest.plan.cases import CASES

    parser = command_parser("loadtest.plan.validate", __doc__)
    add_engine_options(parser)
    add, names = parser.add_argument, list(dict.fromkeys(case.case for case in CASES))
    add("--cases", nargs="*", choices=names, default=names, help="workloads to measure")
    add("--http", type=Path, nargs="+", default=[], metavar="FILE",
        help="recorded load tests, simulated with the calibrations of tight")  # fmt: skip
    add("--scale", type=float, default=1.0, help="multiplies the texts' lengths; to rehearse")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    add("--resume", type=Path, help="a JSONL file of an earlier run: measure only what it lacks")
    return parser.parse_args(argv)


def again(rows: Sequence[Row]) -> list[Row]:
    """What has been measured here, simulated anew, but for what drifted too far.

    What was recorded over HTTP is read again instead.
    """
    from loadtest.plan.calibration import from_row
    from loadtest.plan.cases import CASES

    return [
        row | {"simulated": simulated(case, from_row(row["calibration"]), row["scale"])}
        for row in rows
        for case in CASES
        if case.measured_by(row) and abs(row["drift"]) <= MAX_DRIFT
    ]


def compared(args: argparse.Namespace, rows: Sequence[Row]) -> Iterator[Row]:
    """A row per case that ``rows`` lack."""
    from loadtest.plan.calibration import to_row
    from loadtest.plan.cases import CASES
    from loadtest.plan.measured_engine import MeasuredEngine, calibration_of

    options = {
        "model": args.model or str(default_model_dir()), "dtype": args.dtype, "eager": args.eager,
    }  # fmt: skip
    missing = [
        case
        for case in CASES
        if case.case in args.cases and not any(case.measured_by(row) for row in rows)
    ]
    engine_of = lambda case: case.engine(options, args.scale)  # noqa: E731
    for first, same in itertools.groupby(missing, engine_of):
        print(f"calibrating {first['variant']}, {first['setting']}", flush=True)
        found = []
        with MeasuredEngine(first) as engine:
            before = engine.batches()
            for case in same:
                print(f"measuring {case.case}: {case.variant}", flush=True)
                found.append((case, engine.measure(case.case)))
            after = engine.batches()
            calibration = calibration_of([*before, *after], engine.scheduling, ours=first["ours"])
        drift = sum(step.seconds for step in after) / sum(step.seconds for step in before) - 1
        for case, measured in found:
            yield origin(args) | asdict(case) | {
                "measured": measured, "simulated": simulated(case, calibration, args.scale),
                "calibration": to_row(calibration), "drift": drift,
            }  # fmt: skip


def replayed(args: argparse.Namespace, rows: Sequence[Row]) -> Iterator[Row]:
    """A row per recorded run, but for those that say how fast its server was.

    Raises:
        SystemExit: ``rows`` lack the calibrations.
    """
    from loadtest.http.records import read_runs
    from loadtest.plan.calibration import Calibration, from_row
    from loadtest.plan.replay import replays

    engines: dict[str, Any] = {}
    for row in rows:
        if row["case"] == "tight":
            engines |= from_row(row["calibration"]).engines
    for file in args.http:
        if len(engines) < 2:
            raise SystemExit("--http: needs the calibrations of the case tight, of both engines")
        for row in replays(read_runs(file), Calibration(engines, {})):
            yield origin(args) | row


def origin(args: argparse.Namespace) -> Row:
    """What every row begins with."""
    from loadtest.common.machine import describe_run

    about = describe_run("loadtest.plan.validate")
    return about | {"dtype": args.dtype, "eager": args.eager, "scale": args.scale}


def simulated(case: Any, calibration: Any, scale: float) -> dict[str, float]:
    """What a simulation says of a case."""
    from loadtest.engine.workloads import STOCK_CPU_BLOCK_SIZE
    from loadtest.plan.figures import figures_of
    from loadtest.plan.fleet import Served, serve_jobs
    from loadtest.plan.replay import simulated_figures
    from loadtest.plan.replica import Replica

    jobs, setting = case.jobs(scale), case.pool(scale)
    # A block more for each.
    ample = sum(job.prompt_tokens + job.output_tokens + STOCK_CPU_BLOCK_SIZE for job in jobs)
    pool = setting.pool_tokens or ample + setting.max_model_len
    engine = calibration.engine(case.ours, pool, setting.max_model_len)
    replica = Replica(engine, calibration.step_time(case.ours))
    serve_jobs(replica, jobs)
    return simulated_figures(figures_of(Served([replica], [jobs]), warm_up=0))


def errors_table(rows: Sequence[Row]) -> str:
    """Measured, simulated, and the error of the latter. Markdown; bold is what misses its target."""
    head = ["", "by", "tok/s measured", "simulated", "error", "first token p50 s measured", "simulated",
            "error"]  # fmt: skip
    lines = []
    for row in rows:
        cells = [row["case"], row["variant"]]
        for name, digits in (("tok_per_s", 1), ("first_token_s", 2)):
            measured, found = row["measured"][name], row["simulated"][name]
            error = found / measured - 1
            shown = f"{100 * error:+.0f} %"
            cells += [
                f"{measured:.{digits}f}",
                f"{found:.{digits}f}",
                shown if abs(error) <= TARGETS[name] else f"**{shown}**",
            ]
        lines.append(cells)
    return markdown_table(head, lines)


def markdown(rows: Sequence[Row]) -> str:
    """All of it."""
    met = sum(
        all(
            abs(row["simulated"][name] / row["measured"][name] - 1) <= target
            for name, target in TARGETS.items()
        )
        for row in rows
    )
    drifts = [f"{100 * row['drift']:+.0f} %" for row in rows if "drift" in row]
    paces = {f"{row['variant']}: {row['pace']:.2f}" for row in rows if "pace" in row}
    about = [
        f"{rows[0]['dtype']}, {'eager' if rows[0]['eager'] else 'compiled'}. {met} of {len(rows)} are within "
        "15 % on throughput and 25 % on the median first token; what is not is bold.",
        "",
        "Each engine was calibrated in the process that was measured, before and after. From the first to "
        f"the second time the machine became slower by, in the order of the rows: {', '.join(drifts)}.",
    ]
    if paces:
        about += [
            "",
            "Over HTTP, the run with the lowest rate says how many times as long as that a step of the "
            f"server takes ({', '.join(sorted(paces))}); the others are simulated.",
        ]
    head = ["# The planner against measurements", "", *provenance(rows)]
    return "\n".join([*head, *about, "", errors_table(rows), ""])


if __name__ == "__main__":
    main()
