# SPDX-License-Identifier: Apache-2.0
"""Environment variables of an engine on CPUs. Set by the process that starts the engine; stdlib only.

The C library reads its own before a program's first line, so a process gets them from the one that spawns it.
What the user has set wins.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

FEW_CORES = 4
"""Up to as many the model runs inside the engine core, on all of them."""

SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which users say how GNU's OpenMP waits."""

SPINS = "100000"
"""Rounds that a waiting thread spins: 2 ms on AMD's Zen 5, 5 on an Intel Xeon, as long as the host needs
between two steps. To wake a thread takes as long as a small operation: a step of 31 ms took 42 on a Xeon.

GNU's OpenMP has 300,000. With 20,000 a step took a tenth longer on Zen 5.
"""

TUNABLES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,
        "mmap_threshold": 32 << 20,
        "trim_threshold": (1 << 31) - 1,
        "top_pad": 64 << 20,
    }.items()
)
"""glibc asks for huge pages (2.35 or later, where Linux gives them on request), and keeps what is freed.

A decode step reads all weights, and looks up each page's address; the KV pool's blocks lie anywhere. A step
over a prompt allocates some tens of megabytes per layer, which the kernel would zero anew in the next one.
"""

MALLOC = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Variables by which users say how glibc allocates."""


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have OpenMP's threads spin for :data:`SPINS` rounds in processes started from now on, on few cores.

    To be called before torch is imported where this very process is to do so.
    """
    few = len(os.sched_getaffinity(0)) <= FEW_CORES
    if few and not any(name in environment for name in SPINNING):
        environment["GOMP_SPINCOUNT"] = SPINS


def allocate_by_glibc(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have glibc allocate by :data:`TUNABLES` in processes started from now on."""
    if not any(name in environment for name in MALLOC):
        environment["GLIBC_TUNABLES"] = TUNABLES
