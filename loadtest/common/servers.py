# SPDX-License-Identifier: Apache-2.0
"""Servers that we start, wait for and stop."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from loadtest.common.machine import shown_command

START_SECONDS = 600
STOP_SECONDS = 60
H2O_SERVE = (sys.executable, "-m", "h2o_vllm.server.cli")
"""``h2o-serve`` of this Python's environment, installed as a script or not."""

# `vllm serve` asks for a distribution called vllm, which its CPU build is not.
VLLM_SERVE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1")
"""Stock ``vllm serve``; listens where ``h2o-serve`` does by default."""

# On CPU vLLM claims nearly all of the memory, and does not start where less is free; the pool is smaller.
SMALL_POOL = {"VLLM_CPU_KVCACHE_SPACE": "1"}


class ServerError(Exception):
    """A server that did not come up."""


class Server:
    """A server process, with everything it starts, from :meth:`__enter__` to :meth:`__exit__`.

    It may end and be started again meanwhile, where it was.

    Args:
        program: what is started.
        options: its options.
        log: file for what it prints.
        name: what results call the program.
        listen: the options that say where to listen; ``{port}`` is put in.
        health: path that answers once it is up.
        environment: variables of its own.

    Attributes:
        url: where it listens.
        process: the one started, with whatever it has started in its group.
        program: what the next :meth:`start` starts.
        shown: how it was started, as a result may show it.
        defaults: variables that it gets unless they are set.
    """

    defaults: ClassVar[Mapping[str, str]] = {"VLLM_LOGGING_LEVEL": "WARNING", **SMALL_POOL}

    def __init__(
        self,
        program: Sequence[str],
        options: Sequence[str],
        log: Path,
        *,
        name: str = "h2o-serve",
        listen: Sequence[str] = ("--port", "{port}"),
        health: str = "/health",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.shown = shown_command(name, options)
        place = [word.format(port=self.port) for word in listen]
        self._options = [*options, *place]
        self.program = program
        self._log = log
        self._health = f"{self.url}{health}"
        self._environment = dict(environment or {})

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait_until_ended(STOP_SECONDS)
        self.kill()

    def start(self) -> None:
        """Start it; what it prints comes behind what is in the log."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.program, *self._options],
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its engine is a process too; a signal to the group reaches whatever is left of it. Not a
                # session: Linux schedules sessions against each other, and vLLM's spinning workers can keep
                # the load from running for seconds.
                process_group=0,
                env={**self.defaults, **os.environ, **self._environment},
            )

    def terminate(self) -> None:
        """Ask it to end (SIGTERM), and do not wait."""
        self.process.send_signal(signal.SIGTERM)

    def wait_until_ended(self, seconds: float) -> int:
        """Its exit code. Raises ``subprocess.TimeoutExpired``."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """End it and all it has started at once (SIGKILL)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def wait_until_up(self) -> None:
        """Until it answers. Raises :class:`ServerError`: it ended, or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended: {self.log()[-3000:]}")
            try:
                with urllib.request.urlopen(self._health, timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise ServerError(f"not up after {START_SECONDS} s: {self.log()[-3000:]}")


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
