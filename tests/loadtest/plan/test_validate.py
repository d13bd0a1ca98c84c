# SPDX-License-Identifier: Apache-2.0
"""Calibration and validation: what is measured is simulated, and errors are what they are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from h2o_vllm.models import default_model_dir
from loadtest.common.forced_names import PROCESSOR
from loadtest.common.results import RESULTS
from loadtest.common.tiny_model import make_tiny_model
from loadtest.engine.workloads import SUITES
from loadtest.http.records import read_runs
from loadtest.plan import validate_run
from loadtest.plan.batches import BATCHES, WARM_UP, Batch
from loadtest.plan.calibrate import SETTING, main, table
from loadtest.plan.calibrate_run import recorded
from loadtest.plan.calibration import (
    Calibration,
    CalibrationError,
    Measured,
    read_calibration,
    to_row,
)
from loadtest.plan.cases import CASES
from loadtest.plan.fit import Linear, Residual
from loadtest.plan.recording import STEPS_KEY, read_steps
from loadtest.plan.replay import pace_of, replay, replays
from loadtest.plan.replica import Job
from loadtest.plan.validate import again, errors_table, markdown, simulated
from loadtest.plan.work import Work
from tests.loadtest.plan.engines import Metronome, served, settings

LINEAR = Linear(0.05, (1.6e-3, 5e-3, 0.0, 0.0, 6e-6, 4e-6, 0.0, 0.0))
RESIDUAL = Residual(10, 0.0, 0.1, 0.2)


def calibration(block_size: int = 32) -> Calibration:
    scheduling = {
        "block_size": block_size, "max_num_seqs": 128, "max_num_batched_tokens": 2048, "pipelined": False,
    }  # fmt: skip
    measured = Measured(LINEAR, RESIDUAL, scheduling)
    return Calibration({"stock": measured, "h2o": measured}, {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.case}-{case.variant}")
def test_cases_are_what_the_rooms_measure(case: Any) -> None:
    jobs = case.jobs(scale=1.0)
    first = case.engine({"model": "m", "dtype": "float32", "eager": True}, scale=1.0)
    options = validate_run.options_of(first)
    assert options["dtype"] == "float32" and options["enforce_eager"]
    assert first["model"] == "m" and first["variant"] == case.variant
    assert options["max_model_len"] == case.pool(1.0).max_model_len
    assert max(max(batch.prompts) + batch.output_tokens for batch in BATCHES) <= 1700
    if case.elastic:
        assert PROCESSOR in options["logits_processors"] and len(jobs) == case.elastic
        assert all(job.fields == {"kv_budget": 0.2, "kv_elastic": True} for job in jobs)
        return
    workload = SUITES["cpu"].workloads[case.case]
    assert first["setting"] == workload.setting
    assert [job.prompt_tokens for job in jobs] == workload.prompt_lengths()
    budgets = [job.fields.get("kv_budget") for job in jobs]
    asked = [workload.budgets[job.number % len(workload.budgets)] for job in jobs]
    assert budgets == (asked if case.ours else [None] * len(jobs))


def test_a_case_is_simulated_on_its_pool() -> None:
    found = {
        (case.case, case.variant): simulated(
            case, calibration(), 1.0 if case.case == "tight" else 0.2
        )
        for case in CASES
    }
    assert all(value > 0 for one in found.values() for value in one.values())
    # The pool holds four of 32 requests with all of their KV.
    stock, ours = (found["tight", variant] for variant in ("stock-same-flags", "h2o"))
    assert ours["tok_per_s"] > 1.3 * stock["tok_per_s"]
    assert ours["first_token_s"] < 0.7 * stock["first_token_s"]


def test_cases_of_one_engine_share_it() -> None:
    options = {"model": "m", "dtype": "float32", "eager": True}
    engines = [case.engine(options, 1.0) for case in CASES]
    # Those of one engine stand together: else it would be started twice.
    starts = [first for first, _ in itertools.groupby(engines)]
    assert len(starts) == len({str(first) for first in engines}) == 5


def test_measurements_are_kept_and_simulated_anew() -> None:
    case = CASES[0]
    measured = {"tok_per_s": 1.0, "first_token_s": 2.0}
    kept = to_row(calibration())
    row = asdict(case) | {
        "scale": 0.1, "measured": measured, "simulated": {}, "calibration": json.loads(json.dumps(kept)),
        "drift": -0.1,
    }  # fmt: skip
    recorded_over_http = row | {"case": "HTTP, 1 requests/s"}
    drifted = row | {"drift": -0.16}
    (found,) = again([row, recorded_over_http, drifted])
    assert found == row | {"simulated": simulated(case, calibration(), 0.1)}


def test_recorded_requests_are_replayed() -> None:
    runs = read_runs(RESULTS / "elastic-http-cpu-2026-11-22.jsonl")
    run = next(run for run in runs if run.description["variant"].endswith("elastic"))
    row = replay(run, calibration(), 1.0)
    assert row["case"] == "HTTP, 0.06 requests/s"
    assert row["measured"]["tok_per_s"] == pytest.approx(22.9, abs=0.1)
    assert 1 < row["simulated"]["first_token_s"] < 4
    slower = replay(run, calibration(), 2.0)
    assert slower["simulated"]["first_token_s"] > 1.9 * row["simulated"]["first_token_s"]
    with pytest.raises(CalibrationError, match="blocks of 32 tokens, the calibrated ones of 16"):
        replay(run, calibration(block_size=16), 1.0)
    run.description["server_command"] = "vllm"
    with pytest.raises(CalibrationError, match="lacks --block-size"):
        replay(run, calibration(), 1.0)


def test_the_lowest_rate_says_how_fast_the_server_is() -> None:
    runs = [
        run for run in read_runs(RESULTS / "elastic-http-cpu-2026-11-22.jsonl")
        if run.description["variant"] == "vLLM"
    ]  # fmt: skip
    slowest = min(runs, key=lambda run: run.description["rate"])
    pace = pace_of(slowest, calibration())
    # A machine twice as slow makes the same server half as slow beside it.
    twice = Measured(LINEAR.slower(2), RESIDUAL, calibration().engines["stock"].scheduling)
    assert pace_of(slowest, Calibration({"stock": twice}, {})) == pytest.approx(pace / 2, rel=0.01)
    rows = list(replays(runs, calibration()))
    assert [row["case"] for row in rows] == ["HTTP, 0.12 requests/s", "HTTP, 0.24 requests/s"]
    assert {row["pace"] for row in rows} == {pace}
    fast = Measured(LINEAR.slower(1e-3), RESIDUAL, calibration().engines["stock"].scheduling)
    with pytest.raises(CalibrationError, match="no server takes"):
        pace_of(slowest, Calibration({"stock": fast}, {}))


def row(measured: float, found: float) -> dict[str, Any]:
    return {
        "case": "tight", "variant": "h2o", "command": "x", "machine": "m", "versions": {"vllm": "0"},
        "commit": "c", "date": "d", "dtype": "float32", "eager": True, "drift": 0.1,
        "measured": {"tok_per_s": measured, "first_token_s": 2.0},
        "simulated": {"tok_per_s": found, "first_token_s": 2.5},
    }  # fmt: skip


def test_errors_and_targets() -> None:
    assert "| 100.0 | 114.0 | +14 % | 2.00 | 2.50 | +25 % |" in errors_table([row(100, 114)])
    assert "| **-16 %** |" in errors_table([row(100, 84)])
    text = markdown([row(100, 114), row(100, 84)])
    assert "float32, eager. 1 of 2 are within 15 %" in text and "rows: +10 %, +10 %." in text
    over_http = row(100, 114) | {"variant": "vLLM", "pace": 1.5}
    del over_http["drift"]
    assert "(vLLM: 1.50)" in markdown([row(100, 114), over_http])


def test_batches_fit_and_separate_the_costs() -> None:
    for batch in (*BATCHES, *WARM_UP):
        assert max(batch.prompts) + batch.output_tokens <= SETTING.max_model_len
    kinds = {batch.budget for batch in BATCHES}
    assert kinds == {1.0, 0.9, 0.5, 0.2}
    assert [BATCHES[-1].budget_of(number) for number in range(3)] == [0.2, 1.0, 0.2]
    assert {bool(batch.budgets) for batch in WARM_UP} == {False, True}


def of_batch(batch: Batch) -> tuple[list[Job], Sequence[Work]]:
    """What an engine would compute for it, and what became of its requests."""
    engine = replace(
        settings(ours=True, kv_min_tokens=16), block_size=32, num_blocks=450, max_model_len=1700,
        max_num_batched_tokens=2048, max_num_seqs=128,
    )  # fmt: skip
    jobs = [
        Job(number, 0.0, length, batch.output_tokens, batch.fields(number) or {})
        for number, length in enumerate(batch.prompts)
    ]
    clock = Metronome()
    served(engine, jobs, clock)
    return jobs, clock.works


@pytest.mark.parametrize("batch", [*BATCHES, *WARM_UP], ids=str)
def test_who_has_a_budget_is_scored_and_evicts(batch: Batch) -> None:
    """Otherwise the cost of scores would be fitted to steps that have none."""
    jobs, works = of_batch(batch)
    assert [job.lossless for job in jobs] == [
        batch.budget_of(number) == 1 for number in range(len(jobs))
    ]
    for feature in ("scored_context", "scored_pairs", "ranked"):
        assert any(getattr(work, feature) for work in works) == batch.budgets


def test_scored_context_varies_where_nothing_is_ranked() -> None:
    works = [work for batch in BATCHES for work in of_batch(batch)[1]]
    unranked = {work.scored_context for work in works if not work.ranked and not work.prompt_tokens}
    assert max(unranked) > 4000 and len(unranked) > 20


@pytest.mark.parametrize(
    ("ours", "pipelined", "name"),
    [
        (False, False, "RecordingSync"),
        (False, True, "RecordingAsync"),
        (True, True, "RecordingOurs"),
    ],
)
def test_an_engine_gets_a_scheduler_that_records(ours: bool, pipelined: bool, name: str) -> None:
    options = recorded(
        {"async_scheduling": pipelined, "dtype": "float32"}, "steps.jsonl", ours=ours
    )
    assert options["scheduler_cls"] == f"loadtest.plan.recording.{name}"
    assert options["additional_config"][STEPS_KEY] == "steps.jsonl"
    assert ("h2o" in options["additional_config"]) == ours
    assert options["dtype"] == "float32"


def test_steps_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text('{"seconds": 0.5, "prompt_tokens": 3, "pairs": 6}\n')
    (step,) = read_steps(file)
    assert step.seconds == 0.5 and step.work == Work(prompt_tokens=3, pairs=6)


@pytest.mark.e2e
@pytest.mark.long
def test_a_machine_is_calibrated(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = make_tiny_model(folder, tokenizer_of=default_model_dir())
    file = tmp_path / "c.json"
    options = ["--dtype", "float32", "--eager", "--repeat", "1"]
    main(["--model", str(model), *options, "--out", str(file)])
    found = read_calibration(file)
    for one in found.engines.values():
        assert one.scheduling["block_size"] == 32 and not one.scheduling["pipelined"]
        assert one.residual.steps > 60 and one.linear.seconds(Work(decodes=4, outputs=4)) > 0
    assert found.engines["h2o"].residual.steps > found.engines["stock"].residual.steps
    assert "error, median step" in table(found)
    assert found.about["model"] == "model"
