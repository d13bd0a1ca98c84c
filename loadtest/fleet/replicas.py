# SPDX-License-Identifier: Apache-2.0
"""Replicas of ``h2o-serve`` with cores of their own, and vLLM's router (``vllm-router``) before them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Self

import psutil

from loadtest.common.prometheus import read_metrics
from loadtest.common.results import Row
from loadtest.common.servers import H2O_SERVE, Server, free_port

__all__ = ["POLICIES", "Fleet", "FleetError", "served", "with_router_version"]

POLICIES = ("round_robin", "random", "consistent_hash", "power_of_two", "cache_aware")
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
        policy: how the router chooses, one of ``POLICIES``.

    Attributes:
        replicas: in the order of ``options``.
        router: where requests are sent to.
    """

    def __init__(
        self, model: Path, folder: Path, options: Sequence[Sequence[str]], policy: str
    ) -> None:
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
            ["--host", "127.0.0.1", "--prometheus-port", str(free_port()), "--policy", policy,
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

    def processes(self, number: int) -> list[psutil.Process]:
        """Of a replica: its server, and what that has started."""
        server = psutil.Process(self.replicas[number].pid)
        return [server, *server.children(recursive=True)]

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


def with_router_version(row: Row) -> Row:
    """What a row says of its origin, and which router it was."""
    return row | {"versions": row["versions"] | {"vllm-router": version("vllm-router")}}


def served(url: str) -> float:
    """Requests that the server at ``url`` has answered since it started."""
    return read_metrics(url).get("vllm:request_success_total", 0.0)
