# SPDX-License-Identifier: Apache-2.0
"""The planner: counts as the real block manager has them, and throughput as it was measured."""

from __future__ import annotations

import math

import pytest

from loadtest.common.results import RESULTS, read_rows
from loadtest.plan.__main__ import parse_arguments, planned
from loadtest.plan.cost import Server, fitted
from loadtest.plan.gpus import GPUS
from loadtest.plan.shapes import ShapeError, load_shape
from loadtest.plan.simulate import Load, Pool, Request, Step, held_tokens, simulate
from loadtest.plan.validate import compare

MEASURED = sorted(RESULTS.glob("bench-cpu-2026-11-25-zen5*.jsonl"))


def second(_: Step) -> float:
    return 1.0


def test_published_rows_are_predicted_by_what_the_other_workloads_took() -> None:
    rows = [row for path in MEASURED for row in read_rows(path)]
    found = compare(rows, "h2o")
    assert {one.workload for one in found} >= {"tight", "ample", "long-0.2", "bounded"}
    for one in found:
        # Counts alone: how many requests fit.
        assert one.simulated.running_mean == pytest.approx(one.running, rel=0.05), one.workload
        assert one.simulated.tok_per_s == pytest.approx(one.tok_per_s, rel=0.25), one.workload


def test_as_many_requests_run_as_the_pool_holds() -> None:
    requests = [Request(40, 25, Load()) for _ in range(9)]
    # Each ends with 64 tokens computed: two blocks of 32.
    found = simulate(requests, Pool(blocks=6), second)
    assert (found.running_max, found.preemptions) == (3, 0)
    assert found.wall_s == 3 * 25
    assert found.sums[0] == found.wall_s and found.sums[1] == 9 * 40
    assert found.tok_per_s == 9 * 25 / found.wall_s


def test_a_request_that_finds_no_block_preempts_the_youngest() -> None:
    found = simulate([Request(64, 60, Load()) for _ in range(3)], Pool(blocks=7), second)
    assert found.preemptions > 0
    assert found.sums[1] > 3 * 64, "a prompt is computed anew"


def test_a_budget_frees_blocks_once_the_delay_is_over() -> None:
    request = Request(1000, 200, Load(0.2, delay=16), computed=1016)
    assert request.excess(32) == 0
    request.computed += 1
    keep = math.ceil(0.2 * 1017)
    assert request.excess(32) == (1017 - keep) // 32
    assert 210 < held_tokens(1000, 500, Load(0.2, delay=0)) < 330
    assert held_tokens(1000, 500, Load()) == pytest.approx(1250.5)


def test_a_bounded_prompt_never_holds_much_more_than_its_bound() -> None:
    pool = Pool(blocks=50)
    assert simulate([Request(6000, 10, Load(0.2, prefill=1024))], pool, second).preemptions == 0
    with pytest.raises(ValueError, match="does not fit"):
        simulate([Request(6000, 10, Load())], pool, second)


def test_costs_that_explain_what_was_measured_are_found() -> None:
    sums = [(10, 100, 0, 50, 1000), (20, 50, 0, 80, 5000), (5, 400, 0, 10, 200)]
    seconds, costs = fitted(sums, [0.1 * a + 0.02 * b + 0.003 * e for a, b, _, _, e in sums])
    assert costs == pytest.approx([0.1, 0.02, 0, 0, 0.003])
    assert seconds(Step(10, 0, 2, 100)) == pytest.approx(0.1 + 0.2 + 0.3)


def test_memory_is_what_the_datasheet_leaves() -> None:
    server = Server(load_shape("8b"), GPUS["h100"])
    # 80 GB less 16 GB of weights, 131,072 bytes per token.
    assert 440_000 < server.pool_tokens < 480_000
    assert Server(load_shape("8b"), GPUS["h100"], scored=True).pool_tokens < server.pool_tokens
    with pytest.raises(ShapeError, match="--model"):
        load_shape("nothing")


def test_the_command_answers_what_fits_and_how_fast() -> None:
    text = planned(
        parse_arguments(["--requests", "64", "--traffic", "4000+500", "--pool-tokens", "40000"])
    )
    full, _, fifth = text.splitlines()[-3:]
    cells = [cell.strip() for cell in full.strip("|").split("|")]
    assert cells[:3] == ["1", "40,000", "9"]
    ratio = float(fifth.split("|")[6])
    assert ratio > 1.2
    with pytest.raises(SystemExit):
        parse_arguments(["--traffic", "1000"])
