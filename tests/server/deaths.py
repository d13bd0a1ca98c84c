# SPDX-License-Identifier: Apache-2.0
"""What has to be seen where a process of a loaded server is killed: in ``/health``, streams and exit code."""

import time
from typing import Any

import httpx
import psutil

from tests.server.live_server import LiveServer
from tests.server.streams import under_load

SECONDS_TO_END = 120
"""vLLM looks every 5 s whether its engine lives; then clients have 10 s to read what was said. On a busy
machine that takes as long as it takes: what is promised is that it ends."""


def processes(server: LiveServer, name: str) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    found = [child for child in children if name in " ".join([child.name(), *child.cmdline()])]
    assert found, f"no {name} among {[child.name() for child in children]}"
    return found


def dies_in_public(server: LiveServer, victim: psutil.Process, **options: Any) -> None:
    """Kill a process of a loaded server: everybody is told, and nothing is left."""
    streams = [stream for stream in under_load(server, **options) if stream.is_alive()]
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
