# SPDX-License-Identifier: Apache-2.0
"""Replicas of ``h2o-serve`` behind vLLM's router under Locust's load, and what became of every request."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote

from loadtest.common.client import Client
from loadtest.common.prometheus import read_metrics
from loadtest.common.servers import H2O_SERVE, Server, free_port
from loadtest.http.headless import locust_running
from loadtest.http.records import Record, read_runs

ROUTER = (sys.executable, "-m", "vllm_router.launch_router")
ROUTER_OPTIONS = (
    # Its own default asks every minute, and takes three failures for a replica's end.
    "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
    "--health-success-threshold", "1", "--cb-failure-threshold", "1", "--cb-timeout-duration-secs", "1",
    "--cb-success-threshold", "1",
)  # fmt: skip
"""So that a replica that is gone, or back, is known within a second or two."""

REPLICA_OPTIONS = (
    "--enforce-eager", "--dtype", "float32", "--shutdown-timeout", "60",
    "--enable-log-requests", "--enable-log-outputs", "--max-log-len", "0",
)  # fmt: skip
"""Their logs say of each request when it came and that it was answered, nothing of what."""


class FleetError(Exception):
    """A replica did not do in time what it should."""


class Fleet:
    """Replicas and their router, as long as the block lasts.

    Args:
        model: directory of the model all serve.
        folder: for logs.
        options: of ``h2o-serve``, per replica: so many are started.

    Attributes:
        replicas: in the order of ``options``.
        router: where requests are sent to.
    """

    def __init__(self, model: Path, folder: Path, options: Sequence[Sequence[str]]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._logs = [folder / f"replica-{number}.log" for number in range(len(options))]
        self.replicas = [
            Server(
                H2O_SERVE,
                ["--model", str(model), "--served-model-name", "model", *REPLICA_OPTIONS, *own],
                self._logs[number],
                environment={
                    "VLLM_LOGGING_LEVEL": "INFO",
                    "VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)]),
                },
            )
            for number, own in enumerate(options)
        ]
        urls = [replica.url for replica in self.replicas]
        self.router = Server(
            ROUTER,
            ["--host", "127.0.0.1", "--prometheus-port", str(free_port()), "--policy", "round_robin",
             *ROUTER_OPTIONS, "--worker-urls", *urls],
            folder / "router.log",
            name="vllm-router",
            listen=("--port", "{port}"),
        )  # fmt: skip
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for replica in self.replicas:
                replica.start()
                stack.callback(replica.__exit__)
            for replica in self.replicas:
                replica.wait_until_up()
            stack.enter_context(self.router)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def marks(self) -> list[int]:
        """How long the replicas' logs are now; for :meth:`logs_since`."""
        return [log.stat().st_size for log in self._logs]

    def logs_since(self, marks: Sequence[int]) -> list[str]:
        """What each replica has logged since then."""
        return [
            log.read_bytes()[mark:].decode(errors="replace")
            for log, mark in zip(self._logs, marks, strict=True)
        ]

    def wait_until_served(self, number: int, requests: float, seconds: float = 300.0) -> None:
        """Until a replica has answered so many requests since it started.

        Raises:
            FleetError: it has not within so many seconds.
        """
        deadline = time.monotonic() + seconds
        while (answered := served(self.replicas[number].url)) < requests:
            if time.monotonic() > deadline:
                raise FleetError(
                    f"replica {number} has answered {answered:g} requests in {seconds:g} s, not {requests:g}"
                )
            time.sleep(0.1)


def served(url: str) -> float:
    """Requests that the server at ``url`` has answered since it started."""
    return read_metrics(url).get("vllm:request_success_total", 0.0)


VICTIM = 0
"""The replica that is hit."""

RECEIVED = re.compile(r"Received request \w+-([0-9a-f]{32})")
ANSWERED = re.compile(r"Generated response \w+-([0-9a-f]{32})\S* \(streaming complete\)")


@dataclass(frozen=True)
class Account:
    """Of all requests of a load test.

    Attributes:
        requests: sent, and not cut off by the test's end.
        answered: to their end.
        broken: failed behind their first token; before it, a client can send them again.
        noticed: failed although the replica that was hit had never got them.
        repeated: reached replicas more than once, because the router sent them again.
        twice: were answered to the end more than once, though the client saw one answer.
    """

    requests: int
    answered: int
    broken: int
    noticed: int
    repeated: int
    twice: int


def account(records: Sequence[Record], logs: Sequence[str]) -> Account:
    """Balance the books of a load test.

    Args:
        records: of the client. logs: of each replica, from the test's beginning.
    """
    ended = [record for record in records if not record.cut]
    failed = [record for record in ended if not record.whole]
    received = [Counter(RECEIVED.findall(log)) for log in logs]
    answered = Counter(found for log in logs for found in set(ANSWERED.findall(log)))
    sent = {record.id for record in ended}
    everywhere = sum(received, Counter[str]())
    return Account(
        requests=len(ended),
        answered=len(ended) - len(failed),
        broken=sum(record.ttft is not None for record in failed),
        noticed=sum(record.id not in received[VICTIM] for record in failed),
        repeated=sum(times > 1 for name, times in everywhere.items() if name in sent),
        twice=sum(times > 1 for name, times in answered.items() if name in sent),
    )


def kill(fleet: Fleet) -> None:
    """The whole process group at once; started again, as Kubernetes would."""
    victim = fleet.replicas[VICTIM]
    victim.kill()
    victim.start()
    victim.wait_until_up()


def drain(fleet: Fleet) -> None:
    """The router is told first, as Kubernetes tells it before a preStop hook's end; then SIGTERM."""
    victim = fleet.replicas[VICTIM]
    router, where = Client(fleet.router.url), quote(victim.url, safe="")
    router.stream(f"/remove_worker?url={where}", None, lambda _: None)
    victim.terminate()
    victim.wait_until_ended(120.0)
    victim.start()
    victim.wait_until_up()
    router.stream(f"/add_worker?url={where}", None, lambda _: None)


def under_load(
    fleet: Fleet, happen: Callable[[Fleet], None], seconds: float, file: Path, *, salt: int
) -> Account:
    """One request per second; in the midst of it ``happen``, and the victim serves again before the end.

    Args:
        file: where Locust writes. salt: other prompts for each.
    """
    marks, answers = fleet.marks(), [served(replica.url) for replica in fleet.replicas]
    options = {
        "--host": fleet.router.url, "--model": "model", "-u": 1, "--arrival": "open",
        "--rate": 1, "-t": f"{seconds:g}s", "--stop-timeout": 60, "--prompt-tokens": 300,
        "--output-tokens": 200, "--salt": salt, "--jsonl": file, "--exit-code-on-error": 0,
        # Answers of this route are logged.
        "--endpoint": "chat",
    }  # fmt: skip
    with locust_running(options):
        # Locust takes a while to start.
        for number, before in enumerate(answers):
            fleet.wait_until_served(number, before + 2)
        time.sleep(10.0)
        happen(fleet)
        fleet.wait_until_served(VICTIM, 1)
    (run,) = read_runs(file)
    return account(run.records, fleet.logs_since(marks))
