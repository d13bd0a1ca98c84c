# SPDX-License-Identifier: Apache-2.0
"""Requests of a load test over HTTP, simulated with the times and lengths that were recorded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from loadtest.common.results import Row
from loadtest.http.budgets import Mix
from loadtest.http.records import ALL, Record, Run, summarise
from loadtest.plan.calibration import Calibration, CalibrationError
from loadtest.plan.figures import Figures, figures_of
from loadtest.plan.fleet import Served, serve_jobs
from loadtest.plan.replica import Job, Replica

__all__ = ["jobs_of", "pace_of", "replay", "replays", "simulated_figures"]

VLLM = "vLLM"
"""What :mod:`loadtest.http.compare` calls plain vLLM."""

PACES = (0.1, 10.0)
"""Between these lies how many times as long as a calibrated engine a server may take."""


def replays(runs: Sequence[Run], calibration: Calibration) -> Iterator[Row]:
    """Measured and simulated figures of all runs but each variant's slowest.

    A server is no calibrated engine: it shares its cores with HTTP, may leave one unused, and is another
    process. How much slower that makes it is taken from the run with the lowest rate; with that the others
    are simulated.

    Raises:
        CalibrationError: see :func:`replay`.
    """
    variant = lambda run: str(run.description["variant"])  # noqa: E731
    for _, same in itertools.groupby(sorted(runs, key=variant), variant):
        slowest, *others = sorted(same, key=lambda run: float(run.description["rate"]))
        pace = pace_of(slowest, calibration)
        for run in others:
            yield replay(run, calibration, pace)


def replay(run: Run, calibration: Calibration, pace: float) -> Row:
    """Measured and simulated figures of one run; its server takes ``pace`` times what is calibrated.

    Raises:
        CalibrationError: the run does not say which pool its server had, or had other blocks than what was
            calibrated.
    """
    replica, jobs = _serve(run, calibration, pace)
    measured = summarise(run.records)[ALL]
    rate = run.description["rate"]
    return {
        "case": f"HTTP, {rate:g} requests/s" if rate else "HTTP, closed loop",
        "variant": run.description["variant"],
        "pace": pace,
        "measured": {
            "tok_per_s": measured.tok_per_s,
            "first_token_s": median(measured.samples["ttft"]),
        },
        "simulated": simulated_figures(figures_of(Served([replica], [jobs]), warm_up=0)),
    }


def pace_of(run: Run, calibration: Calibration) -> float:
    """How many times as long as calibrated the run's server takes: then latencies sum up to what they did.

    Raises:
        CalibrationError: see :func:`replay`; also if there is no such number.
    """
    took = sum(record.latency or 0.0 for record in run.records if record.whole)
    low, high = PACES
    for _ in range(12):
        pace = (low * high) ** 0.5
        _, jobs = _serve(run, calibration, pace)
        if sum(job.end - job.at for job in jobs) < took:
            low = pace
        else:
            high = pace
    if low == PACES[0] or high == PACES[1]:
        raise CalibrationError(f"--http: no server takes {pace:g} times what is calibrated")
    return pace


def _serve(run: Run, calibration: Calibration, pace: float) -> tuple[Replica, list[Job]]:
    ours = run.description["variant"] != VLLM
    command = run.description["server_command"]
    found = {
        name: re.search(rf"--{name} (\d+)", command)
        for name in ("block-size", "num-gpu-blocks-override", "max-model-len")
    }
    if not all(found.values()):
        raise CalibrationError(f"--http: the command of a server lacks --{', --'.join(found)}")
    block_size, blocks, longest = (int(one[1]) for one in found.values() if one)
    settings = calibration.engine(ours, (blocks - 1) * block_size, longest)
    if settings.block_size != block_size:
        raise CalibrationError(
            f"--http: its servers have blocks of {block_size} tokens, the calibrated ones of "
            f"{settings.block_size}"
        )
    jobs = jobs_of(run.records)
    replica = Replica(settings, calibration.step_time(ours).slower(pace))
    serve_jobs(replica, jobs)
    return replica, jobs


def simulated_figures(figures: Figures) -> dict[str, float]:
    """The two that are compared."""
    return {"tok_per_s": figures.tok_per_s, "first_token_s": figures.first_token_s["p50"]}


def jobs_of(records: Sequence[Record]) -> list[Job]:
    """The requests that were answered, in the order in which they were due."""
    whole = sorted((record for record in records if record.whole), key=lambda record: record.at)
    return [
        Job(number, record.at, record.prompt_tokens, record.output_tokens, _fields(record.label))
        for number, record in enumerate(whole)
    ]


def _fields(label: str) -> dict[str, Any]:
    return dict(Mix(label.removeprefix("kv="))[0].fields)
