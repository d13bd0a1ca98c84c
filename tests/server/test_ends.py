# SPDX-License-Identifier: Apache-2.0
"""Ends that need a server of their own: a signal while it starts, several engines or API servers."""

import concurrent.futures
import contextlib
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.processes import until
from tests.server.live_server import KEY, MODEL, LiveServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def starts_an_engine(server: LiveServer) -> bool:
    """Whether its engine process exists, be it without its name yet: a spawned child."""
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if "spawn_main" in command or command.startswith("VLLM::"):
                return True
    return False


def test_sigterm_while_starting_ends_it_at_once(tmp_path: Path, tiny: list[str]) -> None:
    with LiveServer(tmp_path / "log", *tiny) as server:
        # Then vLLM waits for its engine process, where it would swallow a KeyboardInterrupt.
        until(lambda: starts_an_engine(server))
        assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        assert server.members_after(seconds=60) == []
        assert "Traceback" not in server.log()


@pytest.mark.alone
@pytest.mark.long
def test_two_api_servers_report_serve_the_page_and_end_on_ctrl_c(
    tmp_path: Path, tiny: list[str]
) -> None:
    options = [*tiny, "--api-server-count", "2", "--kv-budget-min", "0.3", "--kv-playground"]

    def one(i: int) -> tuple[int, object]:
        body = {"model": MODEL, "prompt": [1000] * (200 + i), "max_tokens": 4, "ignore_eos": True}
        answer = server.post("/v1/completions", body | {"kv_budget": 0.2 if i % 4 == 0 else 0.5})
        return answer.status_code, answer.json().get("kv_cache", {}).get("tokens_seen")

    with LiveServer(tmp_path / "log", *options) as server:
        server.wait_until_ready()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(one, range(16)))
        expected = [(400, None) if i % 4 == 0 else (200, 203 + i) for i in range(16)]
        assert answers == expected
        # Whichever server is asked, it tells of all of them.
        for _ in range(4):
            server.wait_for("h2o:request_kv_budget_count", 12)
            server.wait_for("h2o:budget_rejections_total", 4)
            server.wait_for("h2o:kv_tokens_full", 0)
        for _ in range(4):
            page = httpx.get(f"{server.url}/h2o/", auth=("anybody", KEY))
            assert page.status_code == 200 and "<script" in page.text
            body = {"model": MODEL, "prompt": [1000] * 300, "max_tokens": 8, "ignore_eos": True}
            traced = server.post("/v1/completions", body | {"kv_budget": 0.5, "kv_trace": True})
            assert traced.json()["kv_cache"]["trace"], "no trace of an answer"
        # Ctrl-C reaches the whole group.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(timeout=60) == 0
        assert server.members() == []
        assert "Traceback" not in server.log()


CORES = sorted(os.sched_getaffinity(0))[:2]


@pytest.mark.alone
@pytest.mark.skipif(len(CORES) < 2, reason="two engines need two cores")
def test_every_engine_evicts_and_says_so_and_both_end_with_the_server(
    tmp_path: Path, tiny: list[str]
) -> None:
    options = [*tiny, "--kv-budget", "0.9", "--kv-budget-max", "0.9", "--api-server-count", "1"]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES))}
    options += ["--data-parallel-size", "2"]

    def one(i: int) -> int:
        body = {"model": MODEL, "prompt": [1000 + i] * (400 + i), "max_tokens": 8}
        answer = server.post("/v1/completions", body | {"ignore_eos": True, "kv_budget": 0.3})
        return answer.json()["kv_cache"]["tokens_evicted"]

    with LiveServer(tmp_path / "log", *options, environment=binding) as server:
        server.wait_until_ready()
        name = "h2o:evicted_tokens_total"
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            evicted = sum(pool.map(one, range(4)))
        server.wait_for(name, evicted)
        assert all(server.metric(name, engine=engine) > 0 for engine in ("0", "1"))
        headers = {"authorization": f"Bearer {KEY}"}
        said = httpx.get(f"{server.url}/plugins/h2o/config", headers=headers).json()
        # Whoever bounds budgets bounds what escapes them.
        assert (said["limits"]["kv_budget_max"], said["limits"]["kv_protect_max"]) == (0.9, 1024)
        assert said["kv_cache"]["num_tokens"] == 32 * (said["kv_cache"]["num_blocks"] - 2)
        assert said["support"]["data_parallel_size"] == 2
        assert server.stop(signal.SIGTERM) == 0
        assert server.members() == []


@pytest.mark.long
def test_nothing_is_left_of_two_api_servers_that_have_ended(
    tmp_path: Path, tiny: list[str]
) -> None:
    with LiveServer(tmp_path / "log", *tiny, "--api-server-count", "2") as server:
        server.wait_until_ready()
        assert server.stop(signal.SIGTERM) == 0
        assert server.members() == []
