# SPDX-License-Identifier: Apache-2.0
"""Killed servers and workers, under load; a killed engine: ``tests/server/test_short_pool.py``."""

import os
import signal
from pathlib import Path

import pytest

from tests.server.deaths import dies_in_public, processes
from tests.server.live_server import LiveServer
from tests.server.streams import under_load

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TWO_CORES = sorted(os.sched_getaffinity(0))[:2]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_killed_server_leaves_no_engine_behind(tiny: list[str], log: Path) -> None:
    """The engine watches for its parent's end."""
    with LiveServer(log, *tiny) as server:
        server.wait_until_up()
        streams = [stream for stream in under_load(server) if stream.is_alive()]
        assert streams
        server.process.kill()
        assert server.process.wait(timeout=60) == -signal.SIGKILL
        assert server.members_after(seconds=60) == []
        for stream in streams:
            stream.join(120)
            assert stream.failed


@pytest.mark.alone
@pytest.mark.skipif(len(TWO_CORES) < 2, reason="two ranks need two cores")
def test_killed_worker_ends_the_server_with_an_error(tiny: list[str], log: Path) -> None:
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, TWO_CORES))}
    with LiveServer(log, *tiny, "--tensor-parallel-size", "2", environment=binding) as server:
        server.wait_until_up()
        workers = processes(server, "Worker")
        assert len(workers) == 2
        dies_in_public(server, workers[1])
