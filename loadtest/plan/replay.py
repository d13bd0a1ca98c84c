# SPDX-License-Identifier: Apache-2.0
"""Requests of a load test over HTTP, simulated with the times and lengths that were recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from loadtest.common.results import Row
from loadtest.http.budgets import Mix
from loadtest.http.records import ALL, Record, Run, summarise
from loadtest.plan.calibration import Calibration, CalibrationError
from loadtest.plan.figures import Figures, figures_of
from loadtest.plan.fleet import Served, serve_jobs
from loadtest.plan.replica import Job, Replica

__all__ = ["jobs_of", "replay"]

VLLM = "vLLM"
"""What :mod:`loadtest.http.compare` calls plain vLLM."""


def replay(run: Run, calibration: Calibration) -> Row:
    """Measured and simulated figures of one run.

    Raises:
        CalibrationError: the run does not say which pool its server had.
    """
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
    replica = Replica(settings, calibration.step_time(ours))
    serve_jobs(replica, jobs)
    simulated = figures_of(Served([replica], [jobs]), warm_up=0)
    measured = summarise(run.records)[ALL]
    rate = run.description["rate"]
    return {
        "case": f"HTTP, {rate:g} requests/s" if rate else "HTTP, closed loop",
        "variant": run.description["variant"],
        "measured": {
            "tok_per_s": measured.tok_per_s,
            "first_token_s": median(measured.samples["ttft"]),
        },
        "simulated": simulated_figures(simulated),
    }


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


def _fields(label: str) -> dict[str, object]:
    return dict(Mix(label.removeprefix("kv="))[0].fields)
