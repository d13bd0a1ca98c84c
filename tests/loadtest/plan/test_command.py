# SPDX-License-Identifier: Apache-2.0
"""The planner's command from end to end, what its report says, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.common.results import read_rows
from loadtest.plan.__main__ import main
from loadtest.plan.calibration import (
    Calibration,
    CalibrationError,
    Measured,
    read_calibration,
    write_calibration,
)
from loadtest.plan.fit import Linear, Residual

SMALL = (
    "--pool-tokens", "3000", "--max-model-len", "1500", "--max-num-batched-tokens", "512",
    "--traffic", "400+40", "--seconds", "1", "--requests", "80",
)  # fmt: skip

LINEAR = Linear(0.005, (1e-5, 1e-4, 1e-8, 1e-8, 1e-8, 1e-8, 0.0, 0.0))


def calibration() -> Calibration:
    scheduling = {
        "block_size": 32, "max_num_seqs": 64, "max_num_batched_tokens": 512, "pipelined": False,
    }  # fmt: skip
    measured = Measured(LINEAR, Residual(100, 0.01, 0.05, 0.2), scheduling)
    about = {"model": "embedded", "dtype": "float32", "machine": "m", "date": "2026-01-01"}
    return Calibration({"stock": measured, "h2o": measured}, about)


def test_which_rate_do_so_many_gpus_carry(tmp_path: Path) -> None:
    main(
        [
            *SMALL,
            "--gpus",
            "1,4",
            "--mixes",
            "none 0.2+elastic",
            "--out",
            str(tmp_path),
            "--name",
            "p",
        ]
    )
    rows = read_rows(tmp_path / "p.jsonl")
    assert [(row["mix"], row["gpus"]) for row in rows] == [
        (mix, gpus) for mix in ("none", "0.2+elastic") for gpus in (1, 4)
    ]
    for row in rows:
        assert row["kind"] == "simulated" and row["met"]
        assert row["first_token_s"]["p90"] <= row["settings"]["first_token"] == 1.0
        assert "out" not in row["settings"], "a path of the machine"
        assert row["settings"]["seed"] == 0 and row["step_time"]["efficiency"]["compute"] == 0.6
        cost = row["gpus"] * row["dollars_per_hour"] / 3600 / row["tok_per_s"] * 1e6
        assert row["dollars_per_million"] == pytest.approx(cost)
    rate = {(row["mix"], row["gpus"]): row["rate"] for row in rows}
    assert all(rate["0.2+elastic", gpus] > rate["none", gpus] for gpus in (1, 4))
    assert all(rate[mix, 4] > 2 * rate[mix, 1] for mix in ("none", "0.2+elastic"))
    assert {row["lossless"] for row in rows if row["mix"] == "none"} == {1.0}
    text = (tmp_path / "p.md").read_text()
    assert "**Simulated**" in text and "NVIDIA H100 datasheet" in text and "| 4 | vLLM |" in text
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_how_many_gpus_does_a_rate_need_as_calibrated(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    write_calibration(calibration(), file)
    main([*SMALL, "--calibration", str(file), "--rate", "200", "--mixes", "none 0.2",
          "--out", str(tmp_path), "--name", "p"])  # fmt: skip
    stock, ours = read_rows(tmp_path / "p.jsonl")
    assert stock["gpus"] > ours["gpus"] >= 1
    assert stock["rate"] == ours["rate"] == 200
    assert stock["scheduling"]["block_size"] == 32
    assert stock["step_time"]["residual"]["stock"]["typical"] == 0.05
    assert "calibrated: embedded, float32" in (tmp_path / "p.md").read_text()


def test_an_objective_that_nothing_meets_is_a_row(tmp_path: Path) -> None:
    main(
        [*SMALL, "--first-token", "0.001", "--mixes", "none", "--out", str(tmp_path), "--name", "p"]
    )
    (row,) = read_rows(tmp_path / "p.jsonl")
    assert not row["met"]
    assert "none meets the objective" in (tmp_path / "p.md").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--traffic", "azure"), "--traffic: got 'azure', wanted azure-conversation"),
        (("--mixes", "none half"), "--budgets: got 'half'"),
        (("--model", "nowhere"), "--model: got 'nowhere'"),
        (("--model", "70b"), "--tensor-parallel 1: the weights of 70b"),
        (("--tensor-parallel", "3"), "--tensor-parallel: got 3, wanted a divisor of the 32 heads"),
        (
            ("--tensor-parallel", "4", "--gpus", "2"),
            "--gpus: got 2, wanted at least the 4 of a replica",
        ),
        (("--gpu", "l4", "--max-model-len", "131072"), "less than --max-model-len 131,072"),
        (("--calibration", "nowhere.json"), "--calibration: nowhere.json is no file of"),
        (("--max-num-seqs", "9000"), "--max-num-seqs: got 9000, wanted at most the 8192"),
        (("--mixes", " "), "--mixes: got ' ', wanted at least one"),
    ],
)
def test_options_that_cannot_be_used(argv: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*argv, "--out", str(tmp_path), "--name", "p"])
    assert message in str(ended.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--rate", "-1"), "--rate (PLAN_RATE): got '-1', wanted a number >= 0"),
        (("--gpu", "v100"), "--gpu (PLAN_GPU): got 'v100'"),
        (("--percent", "95"), "--percent (PLAN_PERCENT): got '95'"),
    ],
)
def test_values_out_of_range(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_calibration_is_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    write_calibration(calibration(), file)
    found = read_calibration(file)
    assert found == calibration() and found.step_time(True) == LINEAR
    with pytest.raises(CalibrationError, match="--pool-tokens: got 0"):
        found.engine(ours=True, pool_tokens=0, max_model_len=100)


@pytest.mark.parametrize("content", ["", "[]", '{"engines": {"stock": {}}, "about": {}}'])
def test_a_file_that_is_no_calibration(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "c.json"
    file.write_text(content)
    with pytest.raises(CalibrationError, match=r"c\.json is no file of"):
        read_calibration(file)
