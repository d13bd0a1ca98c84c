# SPDX-License-Identifier: Apache-2.0
"""Replicas behind vLLM's router: a drain loses nothing, a kill only what was open there."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from loadtest.common.prometheus import read_metrics
from loadtest.common.servers import H2O_SERVE, Server, free_port
from tests.processes import until
from tests.server.live_server import MODEL
from tests.server.streams import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROUTER = (sys.executable, "-m", "vllm_router.launch_router")
ROUTER_OPTIONS = (
    "--host", "127.0.0.1", "--policy", "round_robin",
    # Its own default asks every minute, and takes three failures for a replica's end.
    "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
    "--health-success-threshold", "1", "--cb-failure-threshold", "1", "--cb-timeout-duration-secs", "1",
    "--cb-success-threshold", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def replicas(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two, a core each, and their router; the first is the one that is hit."""
    pytest.importorskip("vllm_router", reason="vLLM's router is in the extra fleet")
    folder, cores = tmp_path_factory.mktemp("fleet"), sorted(os.sched_getaffinity(0))
    options = ["--model", str(tiny_model), "--served-model-name", MODEL, "--kv-budget", "0.2"]
    options += ["--enforce-eager", "--dtype", "float32", "--shutdown-timeout", "60"]
    with ExitStack() as stack:
        servers = []
        for number in range(2):
            binding = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)])}
            log = folder / f"replica-{number}.log"
            servers.append(
                stack.enter_context(Server(H2O_SERVE, options, log, environment=binding))
            )
        known = [
            "--prometheus-port",
            str(free_port()),
            "--worker-urls",
            *(one.url for one in servers),
        ]
        router = Server(
            ROUTER, [*ROUTER_OPTIONS, *known], folder / "router.log", name="vllm-router"
        )
        yield [*servers, stack.enter_context(router)]


def kill(victim: Server, router: Server) -> None:
    """The whole process group at once; started again, as Kubernetes would."""
    victim.kill()
    victim.start()
    victim.wait_until_up()


def drain(victim: Server, router: Server) -> None:
    """The router is told first, as Kubernetes tells it before a preStop hook's end; then SIGTERM."""
    where = quote(victim.url, safe="")
    httpx.post(f"{router.url}/remove_worker?url={where}", timeout=60).raise_for_status()
    victim.terminate()
    victim.wait_until_ended(120)
    victim.start()
    victim.wait_until_up()
    httpx.post(f"{router.url}/add_worker?url={where}", timeout=60).raise_for_status()


def answered(server: Server) -> float:
    """Requests since it started."""
    return read_metrics(server.url).get("vllm:request_success_total", 0.0)


@pytest.mark.parametrize("happen", [drain, kill])
def test_a_drain_loses_nothing_and_a_kill_what_was_open_there(
    replicas: list[Server], happen: Callable[[Server, Server], None]
) -> None:
    """One stream begins each half second, before, meanwhile and until the victim serves again."""
    victim, other, router = replicas
    streams: list[Stream] = []
    served: Any = SimpleNamespace(url=router.url)
    over = threading.Event()

    def clients() -> None:
        while not over.wait(0.5):
            streams.append(Stream(served, tokens=300 + len(streams), max_tokens=100))

    load = threading.Thread(target=clients)
    load.start()
    try:
        until(lambda: answered(victim) > 2 and answered(other) > 2)
        before = len(streams)
        open_there = read_metrics(victim.url)["vllm:num_requests_running"]
        happen(victim, router)
        until(lambda: answered(victim) > 2)
    finally:
        over.set()
        load.join()
    for stream in streams:
        stream.join(120)
    failed = [stream for stream in streams if stream.failed]
    assert len(streams) > before + 2
    if happen is drain:
        assert not failed
    else:
        # Whoever came between the metrics and the kill, too.
        assert len(failed) <= open_there + 2
        assert all(stream.events for stream in failed), "a client was refused"
