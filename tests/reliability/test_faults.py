# SPDX-License-Identifier: Apache-2.0
"""Killed processes, under load.

Of a real server. Whatever happens has to be visible: in ``/health``, in open streams and in the exit code.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.reliability.streams import under_load
from tests.server.live_server import LiveServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SECONDS_TO_END = 120
"""vLLM looks every 5 s whether its engine lives; then clients have 10 s to read what was said. On a busy
machine that takes as long as it takes: what is promised is that it ends."""

TWO_CORES = sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def processes(server: LiveServer, name: str) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    found = [child for child in children if name in " ".join([child.name(), *child.cmdline()])]
    assert found, f"no {name} among {[child.name() for child in children]}"
    return found


def dies_in_public(server: LiveServer, victim: psutil.Process) -> None:
    """Kill a process of a loaded server: everybody is told, and nothing is left."""
    streams = [stream for stream in under_load(server) if stream.is_alive()]
    assert streams
    killed = time.monotonic()
    victim.kill()
    answers = set()
    while server.process.poll() is None:
        assert time.monotonic() < killed + SECONDS_TO_END, "the server lives on"
        try:
            answers.add(httpx.get(f"{server.url}/health", timeout=5).status_code)
        except httpx.TransportError:
            answers.add(0)
        time.sleep(0.05)
    assert server.process.returncode not in (0, None)
    assert answers <= {200, 503, 0} and 503 in answers
    for stream in streams:
        stream.join(120)
        assert not stream.is_alive()
        assert stream.failed, stream.events[-2:]
    assert server.members_after(seconds=60) == []


def test_killed_engine_core_ends_the_server_with_an_error(tiny: list[str], log: Path) -> None:
    server = LiveServer(log, *tiny)
    try:
        server.wait_until_up()
        dies_in_public(server, processes(server, "EngineCore")[0])
    finally:
        server.kill()


@pytest.mark.long
def test_killed_server_leaves_no_engine_behind(tiny: list[str], log: Path) -> None:
    """One more server; ``tests/engine/test_parent_watch.py`` checks the same without one."""
    server = LiveServer(log, *tiny)
    try:
        server.wait_until_up()
        streams = [stream for stream in under_load(server) if stream.is_alive()]
        assert streams
        server.process.kill()
        assert server.process.wait(timeout=60) == -signal.SIGKILL
        assert server.members_after(seconds=60) == []
        for stream in streams:
            stream.join(120)
            assert stream.failed
    finally:
        server.kill()


@pytest.mark.skipif(len(TWO_CORES) < 2, reason="two ranks need two cores")
def test_killed_worker_ends_the_server_with_an_error(tiny: list[str], log: Path) -> None:
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, TWO_CORES))}
    server = LiveServer(log, *tiny, "--tensor-parallel-size", "2", environment=binding)
    try:
        server.wait_until_up()
        workers = processes(server, "Worker")
        assert len(workers) == 2
        dies_in_public(server, workers[1])
    finally:
        server.kill()
