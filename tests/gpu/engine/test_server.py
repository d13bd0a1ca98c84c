# SPDX-License-Identifier: Apache-2.0
"""``h2o-serve`` on a GPU: engine core and API server in processes of their own, vLLM's defaults."""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.engine.conftest import ENGINE, NUM_BLOCKS
from tests.server.live_server import LiveServer, live_server

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(random_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with live_server(
        log, "--model", random_llama, "--served-model-name", "llama", "--no-enforce-eager",
        "--kv-budget", "0.3", "--kv-min-tokens", "32", "--kv-cache-memory-bytes", "1G",
        "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-seqs", "32",
        "--max-num-batched-tokens", str(ENGINE["max_num_batched_tokens"]),
        "--jit-monitor-mode", ENGINE["jit_monitor_mode"], "--dtype", ENGINE["dtype"],
    ) as server:  # fmt: skip
        yield server


def complete(server: LiveServer, length: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "llama", "prompt": [2 + i % 500 for i in range(length)], "max_tokens": 60}
    response = server.post("/v1/completions", {**body, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["usage"]["completion_tokens"] == 60
    return answer


def test_the_servers_budget_evicts_and_reports(server: LiveServer) -> None:
    report = complete(server, 400)["kv_cache"]
    assert report["policy"] == "attention" and report["blocks_freed"] > 10
    assert report["tokens_held"] < 0.3 * report["tokens_seen"] + 2 * report["block_size"]


def test_requests_with_and_without_budgets_run_together(server: LiveServer) -> None:
    asked: list[dict[str, Any]] = [{}, {"kv_budget": 1.0}, {"kv_policy": "window"}] * 8
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        jobs = [pool.submit(complete, server, 200 + 20 * i, **a) for i, a in enumerate(asked)]
        reports = [job.result()["kv_cache"] for job in jobs]
    assert [report["blocks_freed"] > 0 for report in reports] == [True, False, True] * 8
    server.wait_for("vllm:num_requests_running", 0)
    server.wait_for("vllm:kv_cache_usage_perc", 0)


def test_bad_budgets_do_not_reach_the_engine(server: LiveServer) -> None:
    body = {"model": "llama", "prompt": [5], "max_tokens": 1, "kv_budget": 7}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400 and "kv_budget" in response.text
    complete(server, 50)


def test_it_stops_cleanly(server: LiveServer) -> None:
    assert server.stop() == 0
    assert not server.members_after(10)
