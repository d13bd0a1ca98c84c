# SPDX-License-Identifier: Apache-2.0
"""Simulated against measured, on this machine: throughput and median first token of the published workloads.

    python -m loadtest.plan.validate [--dtype float32 --eager] [--cases tight mixed ...]
    python -m loadtest.plan.validate --calibration calibration.json --http loadtest/results/locust-....jsonl

Calibrates if no file is given, then measures each workload as its own room does, and simulates the same
requests on the same pool. ``--http`` takes rows of ``python -m loadtest.http.compare``, recorded on this
machine with the same model and dtype, and simulates what arrived when. Rows and a table; ``--resume`` goes
on, and simulates anew what has been measured, with another ``--calibration`` if one is given.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from h2o_vllm.models import default_model_dir
from loadtest.common.command import command_parser
from loadtest.common.results import RESULTS, Row, append_rows, publish, read_rows, result_path
from loadtest.common.tables import markdown_table, provenance
from loadtest.plan.calibrate import add_engine_options, calibrate, table

__all__ = ["TARGETS", "errors_table", "main"]

TARGETS = {"tok_per_s": 0.15, "first_token_s": 0.25}
"""How far a simulation may be from what was measured, relative."""


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate, measure, simulate, publish."""
    args = parse_arguments(argv)
    # Of the simulated engines; those that are measured log in processes of their own.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    path = args.resume or result_path("plan-validation", args.out)
    calibration = calibrated(args, path)
    print(f"{table(calibration)}\n", flush=True)
    rows = again(read_rows(path), calibration)
    if rows:
        print(errors_table(rows), flush=True)
        path.write_text("")
        append_rows(path, rows)
    for row in compared(args, calibration, rows):
        rows.append(row)
        append_rows(path, [row])
        print(errors_table([row]).splitlines()[-1], flush=True)
    publish(path, markdown(rows, args))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    from loadtest.plan.cases import CASES

    parser = command_parser("loadtest.plan.validate", __doc__)
    add_engine_options(parser)
    add, names = parser.add_argument, list(dict.fromkeys(case.case for case in CASES))
    add("--calibration", type=Path, help="a file of python -m loadtest.plan.calibrate")
    add("--cases", nargs="*", choices=names, default=names, help="workloads to measure")
    add("--http", type=Path, nargs="+", default=[], metavar="FILE", help="recorded load tests")
    add("--scale", type=float, default=1.0, help="multiplies the texts' lengths; to rehearse")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    add("--resume", type=Path, help="a JSONL file of an earlier run: measure only what it lacks")
    return parser.parse_args(argv)


def calibrated(args: argparse.Namespace, path: Path) -> Any:
    """The calibration that is given, or that of ``path``'s own, which is made if there is none."""
    from loadtest.plan.calibration import read_calibration, write_calibration

    file = args.calibration or path.with_suffix(".calibration.json")
    if not file.exists():
        write_calibration(calibrate(args, "loadtest.plan.validate"), file)
    return read_calibration(file)


def again(rows: Sequence[Row], calibration: Any) -> list[Row]:
    """What has been measured here, simulated anew; what was recorded over HTTP is read again instead."""
    from loadtest.plan.cases import CASES

    return [
        row | {"simulated": simulated(case, calibration, row["scale"])}
        for row in rows
        for case in CASES
        if case.measured_by(row)
    ]


def compared(args: argparse.Namespace, calibration: Any, rows: Sequence[Row]) -> Iterator[Row]:
    """A row per case that ``rows`` lack."""
    from loadtest.common.machine import describe_run
    from loadtest.http.records import read_runs
    from loadtest.plan.cases import CASES
    from loadtest.plan.replay import replay

    about = describe_run("loadtest.plan.validate") | {
        "dtype": args.dtype, "eager": args.eager, "scale": args.scale,
    }  # fmt: skip
    missing = [
        case
        for case in CASES
        if case.case in args.cases and not any(case.measured_by(row) for row in rows)
    ]
    with Engines(args) as engines:
        for case in missing:
            print(f"measuring {case.case}: {case.variant}", flush=True)
            measured = engines.measure(case)
            yield about | asdict(case) | {
                "measured": measured, "simulated": simulated(case, calibration, args.scale),
            }  # fmt: skip
    for file in args.http:
        for run in read_runs(file):
            yield about | replay(run, calibration)


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


class Engines(ExitStack):
    """The one engine that lives now."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self._scale = args.scale
        self._options = {
            "model": args.model or str(default_model_dir()),
            "dtype": args.dtype,
            "enforce_eager": args.eager,
        }
        self._first: object = None
        self._live: Any = None

    def measure(self, case: Any) -> dict[str, float]:
        """Serve a case; starts its engine in place of the one before, if that is another one."""
        from loadtest.common.child import Child

        module, first = case.module(self._options, self._scale)
        if (module, first) != self._first:
            self.close()
            self._live = self.enter_context(Child(module, first))
            self._first = module, first
        if case.elastic:
            one = {"load": case.elastic, "variant": case.variant, "round": 0}
            row = self._live.request(json.dumps(one))
            return {"tok_per_s": row["tok_per_s"], "first_token_s": row["first_token_s"]["p50"]}
        row = self._live.request(case.case)
        return {"tok_per_s": row["tok_per_s"], "first_token_s": row["ttft_s"]["p50"]}


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


def markdown(rows: Sequence[Row], args: argparse.Namespace) -> str:
    """All of it."""
    met = sum(
        all(
            abs(row["simulated"][name] / row["measured"][name] - 1) <= target
            for name, target in TARGETS.items()
        )
        for row in rows
    )
    return "\n".join(
        [
            "# The planner against measurements",
            "",
            *provenance(rows),
            f"{args.dtype}, {'eager' if args.eager else 'compiled'}. {met} of {len(rows)} are within 15 % on "
            "throughput and 25 % on the median first token; what is not is bold.",
            "",
            errors_table(rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
