# SPDX-License-Identifier: Apache-2.0
"""Throughput of h2o_vllm against stock vLLM: same prompts, same run, alternating processes.

    python -m loadtest.engine.bench [--workloads tight ample ...] [--rounds 3] [--out loadtest/results]
    python -m loadtest.engine.bench --device cuda [--help]

Each variant is an engine in a process of its own; those of one setting live side by side, and only one
works at a time, warmed up and with an empty prefix cache for each measurement. Rounds alternate the
variants, so that a slow minute of the machine hits all of them; ratios are taken within a round, then
their median. Writes one JSONL row per measurement, two tables and a PNG. ``--resume FILE`` goes on
where an interrupted run stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.common.child import Child
from loadtest.common.machine import describe_run
from loadtest.engine.tables import measured_table, ratio_table
from loadtest.engine.workloads import SETTINGS, VARIANTS, WORKLOADS, to_measure


def main() -> None:
    """Measure, print, write."""
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="each has its own options; see --device cuda --help",
    )
    if device.parse_known_args()[0].device == "cuda":
        from loadtest.engine import bench_cuda

        bench_cuda.main()
        return
    args = arguments(device)
    path, rows = opened(args)
    jobs = [job for job in planned(args) if not any(job.measured_by(row) for row in rows)]
    with ExitStack() as stack:
        engines: dict[str, Child] = {}
        for count, job in enumerate(jobs, start=1):
            setting = WORKLOADS[job.workload].setting
            if any(engine.first["setting"] != setting for engine in engines.values()):
                stack.close()
                engines.clear()
            if job.variant not in engines:
                print(f"starting {job.variant} for {setting} workloads", flush=True)
                first = {"setting": setting, "variant": job.variant, "model": args.model}
                engines[job.variant] = stack.enter_context(
                    Child("loadtest.engine.bench_run", first)
                )
            print(
                f"[{count}/{len(jobs)}] round {job.round + 1} {job.variant}: {job.workload}", end=""
            )
            result = engines[job.variant].ask(job.workload)
            row = describe_run("loadtest.engine.bench") | asdict(job) | result
            print(f" {row['tok_per_s']:.1f} tok/s", flush=True)
            rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"\n{measured_table(rows)}\n\n{ratio_table(rows)}\n\nrows: {path}")
    from loadtest.engine.plot import plot_bench

    print(f"plot: {plot_bench(rows, path.with_suffix('.png'))}")


def arguments(device: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with the options of ``device``."""
    parser = argparse.ArgumentParser(
        parents=[device],
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="what to serve")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="by what")
    add("--rounds", type=int, default=3, help="how often; variants alternate")
    add(
        "--out",
        type=Path,
        default=Path(__file__).parents[1] / "results",
        help="folder of the results",
    )
    add("--resume", type=Path, help="a JSONL file of an earlier run: measure only what it lacks")
    add("--model", help="a model directory; by default the embedded model")
    args = parser.parse_args()
    if args.model is None:
        from h2o_vllm.models import default_model_dir

        args.model = str(default_model_dir())
    return args


def opened(args: argparse.Namespace) -> tuple[Path, list[dict[str, Any]]]:
    """Where the rows go, and those already there."""
    if args.resume is not None:
        lines = args.resume.read_text().splitlines() if args.resume.exists() else []
        return args.resume, [json.loads(line) for line in lines]
    args.out.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M")
    return args.out / f"bench-cpu-{stamp}.jsonl", []


@dataclass(frozen=True)
class Job:
    """One measurement."""

    round: int
    variant: str
    workload: str

    def measured_by(self, row: dict[str, Any]) -> bool:
        """Whether ``row`` is its result."""
        return all(row[name] == value for name, value in asdict(self).items())


def planned(args: argparse.Namespace) -> Iterator[Job]:
    """All measurements, in order: settings, in them rounds, in them variants in turn."""
    for setting in SETTINGS:
        for round_number in range(args.rounds):
            for variant in args.variants:
                for workload in to_measure(args.workloads, variant):
                    if WORKLOADS[workload].setting == setting:
                        yield Job(round_number, variant, workload)


if __name__ == "__main__":
    main()
