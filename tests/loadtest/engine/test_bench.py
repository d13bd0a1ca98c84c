# SPDX-License-Identifier: Apache-2.0
"""The throughput benchmark: what is measured in which order, by which engine, and how it is compared."""

from __future__ import annotations

from typing import Any, Self

import pytest

from h2o_vllm.models import default_calibration
from loadtest.engine import bench
from loadtest.engine.bench import (
    Engines,
    Measurement,
    about_run,
    model_options,
    parse_arguments,
    planned,
)
from loadtest.engine.tables import measured_table, ratio_table
from loadtest.engine.workloads import SUITES

CPU, CUDA = SUITES["cpu"], SUITES["cuda"]


def test_rounds_alternate_variants_and_stock_serves_equal_traffic_once() -> None:
    names = ["tight", "mixed", "idle"]
    order = [
        (one.round, one.variant, one.workload) for one in planned(CPU, names, ["stock", "h2o"], 2)
    ]
    # Those of one setting in all rounds before the next one's engines are started.
    tight = [(r, v, w) for r in (0, 1)
             for v, w in (("stock", "tight"), ("h2o", "tight"), ("h2o", "mixed"))]  # fmt: skip
    assert order == [*tight, *((r, v, "idle") for r in (0, 1) for v in ("stock", "h2o"))]


def test_on_a_gpu_a_round_is_whole_before_the_next() -> None:
    order = list(planned(CUDA, ["2k-tight", "2k-idle"], ["stock", "h2o"], 2))
    assert [one.round for one in order] == [0] * 4 + [1] * 4


class Started(list[tuple[str, str]]):
    """In the place of engines."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.live_max = 0

    def __call__(self, module: str, first: dict[str, Any]) -> Started:
        self.append((first["setting"], first["variant"]))
        return self

    def __enter__(self) -> Self:
        self.live += 1
        self.live_max = max(self.live, self.live_max)
        return self

    def __exit__(self, *_: object) -> None:
        self.live -= 1


@pytest.mark.parametrize(("device", "starts", "side_by_side"), [("cpu", 4, 2), ("cuda", 8, 1)])
def test_engines_live_side_by_side_on_cpu_and_alone_on_a_gpu(
    device: str, starts: int, side_by_side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, started = SUITES[device], Started()
    monkeypatch.setattr(bench, "Child", started)
    names = ["tight", "idle"] if device == "cpu" else ["2k-tight", "2k-idle"]
    with Engines(suite, {}) as engines:
        for one in planned(suite, names, ["stock", "h2o"], 2):
            engines.get(suite.workloads[one.workload].setting, one)
    assert len(started) == starts
    assert (started.live, started.live_max) == (0, side_by_side)


def row(turn: int, variant: str, workload: str, speed: float) -> dict[str, Any]:
    return {
        "round": turn, "variant": variant, "workload": workload, "tok_per_s": speed, "prompts_s": 2.0,
        "decode_ms": {"8": 10.0, "16": 20.0}, "tokens_hash": 7, "running_mean": 1.0, "running_max": 2,
        "preemptions": 0, "blocks_mean": 1.0, "blocks_peak": 2.0, "ttft_s": {"p50": 1.0, "p99": 2.0},
        "itl_s": {"p50": 0.01, "p99": 0.02}, "peak_rss_mib": 100.0, "start_s": 5.0,
    }  # fmt: skip


def test_ratios_are_taken_within_a_round_also_over_a_twin() -> None:
    rows = [row(0, "stock", "tight", 100), row(1, "stock", "tight", 50)]
    rows += [row(0, "h2o", "mixed", 200), row(1, "h2o", "mixed", 150)]
    assert "| mixed | h2o | stock | 2.50 (2.00-3.00) | 1.00 (1.00-1.00) |" in ratio_table(rows, CPU)
    assert "| mixed | h2o | 175.0 |" in measured_table(rows)
    assert Measurement(0, "h2o", "mixed").measured_by(rows[2])
    assert not Measurement(1, "h2o", "mixed").measured_by(rows[2])


def test_full_kv_on_our_kernel_is_compared_with_stock_and_ours_with_it() -> None:
    rows = [row(0, "stock-same-flags", "long-0.2", 100), row(0, "full-kernel", "long-0.2", 150)]
    rows += [row(0, "h2o", "long-0.1", 300)]
    table = ratio_table(rows, CPU)
    assert "| long-0.2 | full-kernel | stock-same-flags | 1.50 |" in table
    assert "| long-0.1 | h2o | full-kernel | 2.00 |" in table
    assert "| full-kernel | h2o |" not in table and len(table.splitlines()) == 2 + 3
    # It knows no budgets either: equal traffic once.
    assert CPU.to_measure(["long-0.2", "long-0.1"], "full-kernel") == ["long-0.2"]
    assert set(CPU.own) <= set(CPU.variants)
    options = {v: CPU.engine_options(CPU.settings["ample"], v) for v in CPU.variants}
    ours = options.pop("full-kernel")
    assert ours.pop("additional_config") == {"h2o": {"kv_full_kernel": "h2o"}}
    assert ours == options["stock-same-flags"] == options["h2o"]


def test_each_device_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments([]).workloads == list(CPU.workloads)
    args = parse_arguments(["--device", "cuda", "--shape", "tiny", "--scale", "0.1"])
    assert (args.shape, args.variants) == ("tiny", ["stock", "h2o"])
    with pytest.raises(SystemExit):
        parse_arguments(["--workloads", "2k-tight"])
    assert "--workloads" in capsys.readouterr().err


def test_the_embedded_model_is_calibrated_as_its_server_has_it() -> None:
    def calibration(*argv: str) -> str | None:
        found: str | None = model_options(parse_arguments(argv))["calibration"]
        return found

    assert calibration() == str(default_calibration())
    assert calibration("--model", "other") is None
    assert calibration("--model", "other", "--calibration", "/its.h2o") == "/its.h2o"
    assert calibration("--calibration", "/its.h2o") == "/its.h2o"


def test_requests_with_a_budget_may_ask_for_more(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_arguments(["--fields", "kv_policy=caote", "kv_delay=0", "kv_elastic=true"])
    wanted = {"kv_policy": "caote", "kv_delay": 0, "kv_elastic": True}
    assert model_options(args)["fields"] == about_run(args)["fields"] == wanted
    assert "fields" not in about_run(parse_arguments([])), "rows are as they were"
    for field in ("kv_polizy=caote", "kv_policy", "kv_policy="):
        with pytest.raises(SystemExit):
            parse_arguments(["--fields", field])
        assert f"got '{field}', wanted NAME=VALUE" in capsys.readouterr().err


def test_scaled_traffic_is_shorter_and_its_pool_smaller() -> None:
    workload = CUDA.workloads["2k-tight"].scaled(0.1)
    assert (workload.requests, workload.prompt_tokens, workload.output_tokens) == (13, 205, 102)
    assert CUDA.settings["tight"].scaled(0.1).pool_tokens == 13_107
    assert CUDA.settings["ample"].scaled(0.1) == CUDA.settings["ample"]
    assert CPU.settings["tight"].pool(32) == {"num_gpu_blocks_override": 201}
