# SPDX-License-Identifier: Apache-2.0
"""The processes of an engine: their memory, whether they are idle, and others that compete with them."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil

_SETTLE_S = 60.0
"""The most seconds to wait until an engine is idle."""


class Memory(threading.Thread):
    """Peak resident memory of this process and its children since :meth:`restart`, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = 0

    def run(self) -> None:
        """Look twice a second."""
        me = psutil.Process()
        while True:
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)
            time.sleep(0.5)


def settle() -> None:
    """Wait until this process and its children are idle: what a start leaves for later is no step's cost.

    On CPUs our workers take the pages of their pool while they serve, some seconds of a core.
    """
    me = psutil.Process()

    def used() -> float:
        processes = (me, *me.children(recursive=True))
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    end = time.monotonic() + _SETTLE_S
    while time.monotonic() < end:
        before = used()
        time.sleep(1)
        if used() - before < 0.1:
            return


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """While this lasts, as many processes as asked for compute and do nothing else, on any core."""
    with ExitStack() as running:
        for _ in range(processes):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            running.callback(process.wait)
            running.callback(process.kill)
        if processes:
            # Until our threads have noticed.
            time.sleep(2.0)
        yield
