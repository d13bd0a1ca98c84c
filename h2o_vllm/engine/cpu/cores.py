# SPDX-License-Identifier: Apache-2.0
"""Cores that others use as well: threads that wait without spinning, and a word when it happens. Stdlib only.

Runs where the engine is started from (:func:`wait_briefly`), and in the engine core (:func:`watch`).

An operation ends when the last of its threads does. A thread whose core another process has taken comes back
some milliseconds later; a thread that waits for it and spins meanwhile, as OpenMP's do, uses up its own share
of the cores, and is the next to be taken off. A thread that sleeps is let in at once when there is work.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["FEW_CORES", "SPINNING", "Times", "wait_briefly", "watch"]

logger = logging.getLogger(f"vllm.{__name__}")

FEW_CORES = 4
"""Up to as many the model runs inside the engine core, on all of them."""

SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Who sets one of these wants to say how GNU's OpenMP waits."""

SPINS = "1000"
"""Rounds, some microseconds: long enough for threads that end together."""

WINDOW_SECONDS = 10.0
QUIET_SECONDS = 600.0
"""At most one warning in this time."""

BUSY = 0.15
"""Share of the time that threads would run but wait for a core, from which on something is said."""

WARNING = (
    "h2o: others use the %d cores as well: in the last %.0f s the model waited for a core for %.0f %% of the "
    "time in which it could have computed. End them, or leave them a core: OMP_NUM_THREADS=%d (fewer "
    "threads) or VLLM_CPU_NUM_OF_RESERVED_CPU=1 (vLLM's own layout)"
)


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's threads sleep soon when they wait, in processes started from now on, on few cores.

    To be called before torch is imported where this very process is to do so.
    """
    few = len(os.sched_getaffinity(0)) <= FEW_CORES
    if few and not any(name in environment for name in SPINNING):
        environment["GOMP_SPINCOUNT"] = SPINS


class Times(NamedTuple):
    """What the threads of this process have had so far, in seconds: a core, or a place in the queue.

    Those that give way to the others (``h2o-pages``) are not among them: they wait for us.
    """

    ran: float
    waited: float

    @classmethod
    def now(cls) -> Times | None:
        """As Linux counts them; ``None`` where it does not."""
        ran = waited = 0
        usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
        for task in Path("/proc/self/task").iterdir():
            try:
                if os.getpriority(os.PRIO_PROCESS, int(task.name)) > usual:
                    continue
                times = (task / "schedstat").read_text().split()
            except (FileNotFoundError, ProcessLookupError):
                # Ended since.
                continue
            except OSError:
                return None
            ran, waited = ran + int(times[0]), waited + int(times[1])
        return cls(ran / 1e9, waited / 1e9) if ran else None

    def waiting_share(self, before: Times) -> float:
        """Share of the time since ``before`` spent waiting; 0 for a process that did next to nothing."""
        ran, waited = self.ran - before.ran, self.waited - before.waited
        return waited / (ran + waited) if ran + waited > 1 else 0.0


def watch() -> threading.Thread | None:
    """Warn when others take the cores, from a thread, for as long as the process lives.

    ``None`` where Linux does not say.
    """
    if Times.now() is None:
        return None
    thread = threading.Thread(target=_watch, name="h2o-cores", daemon=True)
    thread.start()
    return thread


def _watch(
    times: Callable[[], Times | None] = Times.now, sleep: Callable[[float], None] = time.sleep
) -> None:
    before, warned = times(), -QUIET_SECONDS
    while True:
        sleep(WINDOW_SECONDS)
        now = times()
        if now is None or before is None:
            return
        share = now.waiting_share(before)
        if share > BUSY and time.monotonic() - warned > QUIET_SECONDS:
            warned = time.monotonic()
            cores = len(os.sched_getaffinity(0))
            logger.warning(WARNING, cores, WINDOW_SECONDS, 100 * share, max(1, cores - 1))
        before = now
