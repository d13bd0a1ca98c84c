# SPDX-License-Identifier: Apache-2.0
"""How OpenMP's threads wait for each other: with a spin, or asleep. Imports torch where it runs.

Set before the engine starts (:func:`spin_briefly`), changed in the engine core (:class:`PassiveWait`).

A step is some hundreds of operations with a little Python between them, for which all threads but one wait.
To wake one that sleeps takes as long as a small operation: on an Intel Xeon a step of 31 ms took 42. So
threads spin, for as long as such a gap may last. But an operation ends when the last of its threads does,
and where another process has taken that one's core, it comes back some milliseconds later; those that spin
meanwhile use up their own share of the cores, and are the next to be taken off. A thread that sleeps is let
in at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import MutableMapping

__all__ = [
    "FEW_CORES",
    "SPINNING",
    "SPINS",
    "PassiveWait",
    "may_change_waiting",
    "spin_briefly",
]

FEW_CORES = 4
"""Up to as many the model runs inside the engine core, on all of them."""

SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which users say how GNU's OpenMP waits."""

SPINS = "100000"
"""Rounds: 2 milliseconds on AMD's Zen 5, 5 on an Intel Xeon, as long as the host needs between two steps.

GNU's OpenMP would have 300,000; with 20,000 a step took a tenth longer on Zen 5, where a round is short.
"""


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP's threads spin for a little when they wait, in processes started from now on, on few cores.

    To be called before torch is imported where this very process is to do so.
    """
    few = len(os.sched_getaffinity(0)) <= FEW_CORES
    if few and not any(name in environment for name in SPINNING):
        environment["GOMP_SPINCOUNT"] = SPINS


def may_change_waiting() -> bool:
    """Whether how threads wait is ours to say in this process, and not what the user has said."""
    return os.environ.get("GOMP_SPINCOUNT") == SPINS


class PassiveWait:
    """While it lasts, threads sleep as soon as they wait.

    GNU's OpenMP lets them spin for no more than 100 rounds where it has more threads than there are cores
    (its documentation of ``GOMP_SPINCOUNT``). So a thread that does nothing has a team of its own.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    @property
    def lasts(self) -> bool:
        """Whether it has begun, and not ended."""
        return self._thread is not None

    def begin(self) -> None:
        """Have threads sleep from now on; if they do already, nothing."""
        if self._thread is not None:
            return
        there = threading.Event()
        self._over.clear()
        self._thread = threading.Thread(
            target=self._keep_team, args=(there,), name="h2o-passive-wait", daemon=True
        )
        self._thread.start()
        there.wait()

    def end(self) -> None:
        """Let threads spin again."""
        if self._thread is None:
            return
        self._over.set()
        # The team ends with the thread it belongs to.
        self._thread.join()
        self._thread = None

    def _keep_team(self, there: threading.Event) -> None:
        _operation()
        there.set()
        self._over.wait()


def _operation() -> None:
    import torch

    # From 32,768 elements on, torch has one more thread for each as many.
    torch.zeros(1 << 18)
