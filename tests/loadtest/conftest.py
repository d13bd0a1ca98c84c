# SPDX-License-Identifier: Apache-2.0
"""Mock servers in processes of their own: measuring must not share an interpreter with what is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
StartMock = Callable[..., str]

# Each set of options is a process, and a second: tests share them where they can.
TIMED = ("--ttft-ms", "150", "--itl-ms", "20")
FAST = ("--ttft-ms", "5", "--itl-ms", "1")
ONE_PLACE = (*TIMED, "--max-running", "1")


@pytest.fixture(scope="session")
def start_mock() -> Iterator[StartMock]:
    """Starts a mock server with the given options; returns its URL. The same options, the same server."""
    servers: dict[tuple[str, ...], tuple[subprocess.Popen[str], str]] = {}

    def start(*options: str) -> str:
        if options not in servers:
            command = [sys.executable, "-m", "tests.loadtest.http.mock_server", *options]
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            # Listening before it says so: connections wait in the queue until it accepts them.
            servers[options] = process, process.stdout.readline().split()[-1]
        return servers[options][1]

    try:
        yield start
    finally:
        for process, _ in servers.values():
            process.kill()
            process.wait()
