# SPDX-License-Identifier: Apache-2.0
"""Freed memory stays with the worker. Runs in each CPU worker.

A step over a prompt allocates some tens of megabytes per layer and frees them again. glibc gives such memory
back to the kernel, which zeroes each page anew in the next layer: 1.2 million times in a benchmark of two
minutes. vLLM's documentation preloads tcmalloc against it, which has to be installed; this needs nothing.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

LARGEST = 32 << 20
"""Bytes from which on memory is the kernel's in any case: the most that glibc takes for a threshold."""

AT_A_TIME = 64 << 20
"""Bytes by which the heap grows."""

NEVER = (1 << 31) - 1
"""The most free bytes at the heap's end that can be named."""

SETTINGS = {
    "TRIM_THRESHOLD": (-1, NEVER),
    "TOP_PAD": (-2, AT_A_TIME),
    "MMAP_THRESHOLD": (-3, LARGEST),
}
"""By name, ``M_*`` in glibc's ``malloc.h``: number and value."""


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, unless the user has said by environment what it should do.

    Returns:
        Whether it does; not if the C library is another one.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(
        f"MALLOC_{name}_" in os.environ or f"glibc.malloc.{name.lower()}=" in tunables
        for name in SETTINGS
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    taken = [mallopt(number, value) for number, value in SETTINGS.values()]
    return all(taken)
