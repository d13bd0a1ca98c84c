# SPDX-License-Identifier: Apache-2.0
"""Throughput of h2o_vllm against stock vLLM: same prompts, same run, alternating processes.

    python -m loadtest.bench [--workloads tight ample ...] [--rounds 3] [--out loadtest/results]
    python -m loadtest.bench --device cuda [--help]

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
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.machine import describe_run
from loadtest.tables import measured_table, ratio_table
from loadtest.workloads import (
    RESULT_MARK,
    SETTINGS,
    VARIANTS,
    WORKLOADS,
    to_measure,
)


def main() -> None:
    """Measure, print, write."""
    if "cuda" in sys.argv[1:] or "--device=cuda" in sys.argv[1:]:
        from loadtest import bench_cuda

        # It has options of its own.
        bench_cuda.main()
        return
    args = arguments()
    path, rows = opened(args)
    jobs = [job for job in planned(args) if not any(job.measured_by(row) for row in rows)]
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for count, job in enumerate(jobs, start=1):
            setting = WORKLOADS[job.workload].setting
            if any(engine.setting != setting for engine in engines.values()):
                stack.close()
                engines.clear()
            if job.variant not in engines:
                print(f"starting {job.variant} for {setting} workloads", flush=True)
                engine = Engine(setting, job.variant, args.model)
                engines[job.variant] = stack.enter_context(engine)
            print(
                f"[{count}/{len(jobs)}] round {job.round + 1} {job.variant}: {job.workload}", end=""
            )
            row = describe_run("loadtest.bench") | asdict(job) | engines[job.variant].measure(job)
            print(f" {row['tok_per_s']:.1f} tok/s", flush=True)
            rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"\n{measured_table(rows)}\n\n{ratio_table(rows)}\n\nrows: {path}")
    from loadtest.plot import plot_bench

    print(f"plot: {plot_bench(rows, path.with_suffix('.png'))}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="what to serve")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="by what")
    add("--rounds", type=int, default=3, help="how often; variants alternate")
    add("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
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


class Engine(AbstractContextManager["Engine"]):
    """A measuring process with an engine in it, up when the constructor returns.

    Raises:
        SystemExit: it failed, now or later; the end of its output is shown.
    """

    def __init__(self, setting: str, variant: str, model: str) -> None:
        self.setting, self.variant = setting, variant
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loadtest.bench_run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ},
        )
        self._ask(json.dumps({"setting": setting, "variant": variant, "model": model}))

    def measure(self, job: Job) -> dict[str, Any]:
        """The result of one workload."""
        return self._ask(job.workload)

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.stdout.close()  # type: ignore[union-attr]

    def _ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        for answer in self.process.stdout:
            # vLLM logs to the same stream.
            if answer.startswith(RESULT_MARK):
                result: dict[str, Any] = json.loads(answer.removeprefix(RESULT_MARK))
                return result
            self.log.append(answer)
        raise SystemExit(f"{self.setting} {self.variant} failed:\n{''.join(self.log)[-6000:]}")


if __name__ == "__main__":
    main()
