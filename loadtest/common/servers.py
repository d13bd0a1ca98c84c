# SPDX-License-Identifier: Apache-2.0
"""Servers that a comparison starts and stops, and what they say on ``/metrics`` meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

__all__ = ["Sampler", "Server", "ServerError", "free_port"]

START_SECONDS = 600
STOP_SECONDS = 60
SAMPLE_SECONDS = 1.0
# On CPU vLLM claims nearly all of the memory, and does not start where less is free; the pool is smaller.
DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1"}

_METRIC = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class ServerError(Exception):
    """A server that did not come up."""


class Server:
    """A server process, with everything it starts, from :meth:`__enter__` to :meth:`__exit__`.

    Attributes:
        url: where it listens.
        pid: of the process started.
        command: how it was started, without what is only known here (port).
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = command
        self._log = log

    def __enter__(self) -> Server:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.command, "--port", str(self.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its engine is a process too; a signal to the group reaches whatever is left of it. Not a
                # session: Linux schedules sessions against each other, and vLLM's spinning workers can keep
                # the load from running for seconds.
                process_group=0,
                env={**DEFAULTS, **os.environ},
            )
        self.pid = self._process.pid
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended: {self._log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise ServerError(f"not up after {START_SECONDS} s: {self._log.read_text()[-3000:]}")


class Sampler(threading.Thread):
    """Reads vLLM's metrics once a second between :meth:`__enter__` and :meth:`__exit__`.

    A server without them gives an empty :attr:`result`.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = f"{url.rstrip('/')}/metrics"
        self._over = threading.Event()
        self._samples: list[dict[str, float]] = []
        self.result: dict[str, float] = {}

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        self.result = summary(self._samples)

    def run(self) -> None:
        while True:
            if found := self._read():
                self._samples.append(found)
            if self._over.wait(SAMPLE_SECONDS):
                return

    def _read(self) -> dict[str, float]:
        try:
            with urllib.request.urlopen(self._url, timeout=10) as answer:
                return metrics(answer.read().decode())
        except (OSError, urllib.error.URLError):
            return {}


def metrics(text: str) -> dict[str, float]:
    """vLLM's metrics by name, summed over their labels."""
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    """What the samples say of the time in which requests were running."""
    running = "vllm:num_requests_running"
    busy = [sample for sample in samples if sample.get(running)]
    if not busy:
        return {}
    first, last = samples[0], samples[-1]
    return {
        "running_mean": round(statistics.fmean(sample[running] for sample in busy), 2),
        "running_max": max(sample[running] for sample in busy),
        "kv_usage_mean": round(statistics.fmean(s["vllm:kv_cache_usage_perc"] for s in busy), 4),
        "preemptions": last["vllm:num_preemptions_total"] - first["vllm:num_preemptions_total"],
        "prefix_cache_hits": (
            last["vllm:prefix_cache_hits_total"] - first["vllm:prefix_cache_hits_total"]
        ),
    }


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
