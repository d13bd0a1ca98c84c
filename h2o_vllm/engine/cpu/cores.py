# SPDX-License-Identifier: Apache-2.0
"""Cores that others use as well: noticed while the engine runs. Runs in the engine core; stdlib only.

Then threads sleep when they wait for each other (:mod:`.waiting`), and the log says what has happened.
"""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from h2o_vllm.engine.cpu.waiting import PassiveWait

__all__ = ["Times", "watch"]

logger = logging.getLogger(f"vllm.{__name__}")

WINDOW_SECONDS = 1.0
WINDOWS = 2
"""So many of them are judged together."""

QUIET_SECONDS = 600.0
"""At most one warning in this time."""

BUSY = 0.3
"""Share of the time that threads would run but wait for a core, from which on another process computes.
Beside one other process it was 0.37 to 0.48, alone 0.05 to 0.2 (the front end's work and our own threads)."""

CALM = 0.22
"""Below this share none does."""

WARNING = (
    "h2o: others use the %d cores as well: in the last %.0f s the model waited for a core for %.0f %% of the "
    "time in which it could have computed. End them, or leave them a core: OMP_NUM_THREADS=%d (fewer "
    "threads) or VLLM_CPU_NUM_OF_RESERVED_CPU=1 (vLLM's own layout)"
)


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

    def waiting_share(self, before: Times) -> float | None:
        """Share of the time since ``before`` spent waiting; ``None`` of a process that was idle."""
        ran, waited = self.ran - before.ran, self.waited - before.waited
        return waited / (ran + waited) if ran + waited > WINDOW_SECONDS / 10 else None


def watch(passive: PassiveWait | None) -> threading.Thread | None:
    """Notice when others take the cores, from a thread, for as long as the process lives.

    Args:
        passive: what begins then, and ends with it; ``None``: nothing, but for the warning.

    Returns:
        ``None`` where Linux does not say.
    """
    if Times.now() is None:
        return None
    thread = threading.Thread(target=_watch, args=(passive,), name="h2o-cores", daemon=True)
    thread.start()
    return thread


def _watch(
    passive: PassiveWait | None,
    times: Callable[[], Times | None] = Times.now,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    shares: deque[float] = deque(maxlen=WINDOWS)
    before, warned = times(), -QUIET_SECONDS
    while True:
        sleep(WINDOW_SECONDS)
        now = times()
        if now is None or before is None:
            return
        share, before = now.waiting_share(before), now
        if share is None:
            continue
        shares.append(share)
        if len(shares) < WINDOWS:
            continue
        recent = statistics.fmean(shares)
        if recent > BUSY:
            if passive is not None:
                passive.begin()
            if time.monotonic() - warned > QUIET_SECONDS:
                warned = time.monotonic()
                cores, seconds = len(os.sched_getaffinity(0)), WINDOWS * WINDOW_SECONDS
                logger.warning(WARNING, cores, seconds, 100 * recent, max(1, cores - 1))
        elif recent < CALM and passive is not None:
            passive.end()
