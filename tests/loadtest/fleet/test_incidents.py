# SPDX-License-Identifier: Apache-2.0
"""What happens to a fleet, on processes that stand in for replicas."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from loadtest.fleet import incidents

WRITER = """
import sys, time
while True:
    try:
        with open(sys.argv[1], "a") as file:
            file.write("a line\\n")
    except OSError:
        print("full", flush=True)
    time.sleep(0.01)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_full_disk_fails_writes_and_ends_nobody(
    tmp_path: Path, writer: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    # It exists from the first opening on, and grows with the first closing.
    while not file.exists() or file.stat().st_size == 0:
        time.sleep(0.01)
    sizes: list[int] = []

    def full(seconds: float) -> None:
        del seconds
        assert writer.stdout is not None
        assert writer.stdout.readline() == "full\n"
        sizes.append(file.stat().st_size)
        assert writer.stdout.readline() == "full\n"
        sizes.append(file.stat().st_size)

    monkeypatch.setattr(incidents, "time", SimpleNamespace(sleep=full))
    fleet: Any = SimpleNamespace(processes=lambda number: [psutil.Process(writer.pid)])
    incidents.fill_disk(fleet)
    assert sizes[0] == sizes[1] > 0
    deadline = time.monotonic() + 10
    while file.stat().st_size == sizes[1]:
        assert time.monotonic() < deadline, "nothing was written after the disk had room again"
        time.sleep(0.01)
    assert writer.poll() is None


def test_a_drain_tells_the_router_first_and_last() -> None:
    told: list[str] = []

    class Victim:
        url = "http://127.0.0.1:1"

        def __getattr__(self, method: str) -> Any:
            return lambda *_: told.append(method)

    class Router:
        def __init__(self, url: str) -> None:
            assert url == "http://router"

        def stream(self, path: str, *_: object) -> None:
            told.append(path)

    fleet: Any = SimpleNamespace(replicas=[Victim()], router=SimpleNamespace(url="http://router"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incidents, "Client", Router)
        incidents.drain(fleet)
    where = "http%3A%2F%2F127.0.0.1%3A1"
    assert told == [
        f"/remove_worker?url={where}", "terminate", "wait_until_ended", "start", "wait_until_up",
        f"/add_worker?url={where}",
    ]  # fmt: skip
