# SPDX-License-Identifier: Apache-2.0
"""What has been loaded moves to huge pages, while the server already serves. Runs in each CPU worker.

A decode step reads all weights, and finds each 4 KiB of them by an address of its own: 66,000 lookups for a
model of 135 million parameters. glibc and vLLM ask for no huge pages, so where Linux gives them to who asks
(``/sys/kernel/mm/transparent_hugepage/enabled``: ``madvise``) the weights have none. ``MADV_COLLAPSE``
(Linux 6.1) moves memory that is in use, and changes no byte of it.

It is found by its size, not by its owner: packed weights belong to oneDNN, which names no address.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from h2o_vllm.engine.cpu.pages import advise

if TYPE_CHECKING:
    from collections.abc import Iterator

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

__all__ = ["collapse", "on_small_pages"]

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")

SMAPS = Path("/proc/self/smaps")

HUGE = 1 << 21

LARGE = 1 << 24
"""Bytes from which on memory is worth a look."""

USED = 0.9
"""Share of such memory that must be in use: a huge page takes what lies beside, which nobody may want."""

MADV_COLLAPSE = 25
"""``linux/mman.h``, Linux 6.1."""


def on_small_pages(smaps: str) -> Iterator[tuple[int, int]]:
    """Start and size of large private memory of no file that is in use, much of it on small pages.

    Linux makes one range of neighbours, so that what is new can lie in one that was moved before.

    Args:
        smaps: what ``/proc/PID/smaps`` says.
    """
    start = size = resident = 0
    for line in smaps.splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            permissions, inode, name = rest[0], rest[3], rest[4:]
            private = permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"])
            size = end - start if private else 0
        elif first == "Rss:":
            resident = int(rest[0]) << 10
        elif first == "AnonHugePages:":
            huge = int(rest[0]) << 10
            if resident >= USED * size and min(size, resident - huge) >= LARGE:
                yield start, size


def collapse() -> int:
    """Move what :func:`on_small_pages` finds, a huge page at a time; returns its bytes on huge pages.

    None where the machine's operator wants no huge pages (``never``), or Linux cannot.
    """
    try:
        if "[never]" in ENABLED.read_text():
            return 0
        found = list(on_small_pages(SMAPS.read_text()))
    except OSError as error:
        logger.debug("h2o: no huge pages for the weights: %s", error)
        return 0
    moved = 0
    for start, size in found:
        for page in range(-(-start // HUGE) * HUGE, (start + size) // HUGE * HUGE, HUGE):
            moved += 0 if advise(page, HUGE, MADV_COLLAPSE) else HUGE
    logger.debug("h2o: %d MiB of %d ranges are on huge pages now", moved >> 20, len(found))
    return moved
