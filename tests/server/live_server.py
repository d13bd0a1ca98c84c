# SPDX-License-Identifier: Apache-2.0
"""A real ``h2o-serve`` in its own process group, with the embedded model."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.common.servers import H2O_SERVE, SMALL_POOL, START_SECONDS, Server
from tests.processes import until
from tests.published import PUBLISHED_OPTIONS

MODEL = "SmolLM2-135M-Instruct"
KEY = "live-test-key"

ENVIRONMENT = dict(os.environ)
"""As it was before any test: an engine in this process leaves variables behind that are not for a server."""


class LiveServer(Server):
    """Started within the block, with the log that a user gets; ready after :meth:`wait_until_up`."""

    defaults = SMALL_POOL

    def __init__(
        self, log: Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        script = Path(sys.executable).with_name("h2o-serve")
        program = [str(script)] if script.exists() else H2O_SERVE
        own = ["--enforce-eager", "--max-model-len", "2048"]
        # CPUs without AVX-512 emulate bfloat16, ten times slower; test_modes.py has engines in it.
        own += ["--dtype", "float32", *PUBLISHED_OPTIONS]
        super().__init__(program, [*own, *options], log, environment=environment)

    def __enter__(self) -> Self:
        with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=START_SECONDS
        )

    def post(self, path: str, body: Any, key: str = KEY) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=START_SECONDS)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over its labels, those given excepted."""
        return self.metrics(name, **labels)[0]

    def metrics(self, *names: str, **labels: str) -> list[float]:
        """Several metrics as of one moment."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        sums = []
        for name in names:
            values = [
                sample.value
                for sample in samples
                if sample.name == name and labels.items() <= sample.labels.items()
            ]
            assert values, f"no metric {name}"
            sums.append(sum(values))
        return sums

    def wait_for(self, name: str, value: float, seconds: float = 120) -> None:
        """Until the metric has the value; the engine reports with a delay."""
        deadline = time.monotonic() + seconds
        while (got := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {got}, not {value}"
            time.sleep(0.05)

    def wait_until_ready(self) -> None:
        """Until it has said so, once, whatever the number of its processes."""
        self.wait_until_up()
        until(lambda: "h2o-serve: stop:" in self.log(), START_SECONDS)
        assert self.log().count("h2o-serve: ready.") == 1

    def is_idle(self) -> None:
        """Until nothing runs, waits or holds a block."""
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            self.wait_for(f"vllm:{gauge}", 0, 300)

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Signal the process that the user started; returns its exit code."""
        self.process.send_signal(signum)
        return self.process.wait(timeout=60)

    def members(self) -> list[int]:
        """Process ids of the whole group that still run."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if _group_of(pid) == self.process.pid and not _is_zombie(pid)]

    def members_after(self, seconds: float) -> list[int]:
        """What is left once Python's resource tracker has had time to remove shared memory."""
        deadline = time.monotonic() + seconds
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def weight(self) -> tuple[int, int]:
        """Resident bytes and open files of its processes together."""
        every = [psutil.Process(pid) for pid in self.members()]
        return sum(one.memory_info().rss for one in every), sum(one.num_fds() for one in every)


@contextmanager
def live_server(
    log: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[LiveServer]:
    """A server that is up within the block, and gone after it."""
    with LiveServer(log, *options, environment=environment) as server:
        server.wait_until_up()
        yield server


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
