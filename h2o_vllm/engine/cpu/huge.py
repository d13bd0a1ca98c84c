# SPDX-License-Identifier: Apache-2.0
"""What has been loaded moves to huge pages, while the server already serves. Runs in each CPU worker.

A decode step reads all weights, and finds each 4 KiB of them by an address of its own: 66,000 lookups for a
model of 135 million parameters. glibc and vLLM ask for no huge pages, so where Linux gives them on request
(``/sys/kernel/mm/transparent_hugepage/enabled``: ``madvise``) the weights have none. ``MADV_COLLAPSE``
(Linux 6.1) moves memory that is in use, and changes no byte of it.

It is found by its size, not by its owner: packed weights belong to oneDNN, which names no address.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from h2o_vllm.engine.cpu.pages import advise

if TYPE_CHECKING:
    from collections.abc import Iterator

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

__all__ = ["collapse", "on_small_pages", "pages_in_use"]

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")

SMAPS = Path("/proc/self/smaps")

HUGE = 1 << 21

LARGE = 1 << 24
"""Bytes on small pages from which on memory is worth a look."""

USED = 0.9
"""Share of a huge page that must be in use: it takes what lies beside, which may be unused."""

MADV_COLLAPSE = 25
"""``linux/mman.h``, Linux 6.1."""


def on_small_pages(smaps: str) -> Iterator[tuple[int, int]]:
    """Start and size of large private memory of no file, of which much is in use and on small pages.

    Linux makes one range of neighbours: beside what is new there may lie what was moved before, and what
    no code has touched.

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
            if min(size, resident - huge) >= LARGE:
                yield start, size


def pages_in_use(start: int, size: int) -> Iterator[int]:
    """Where the huge pages of a range begin whose memory is in use.

    Raises:
        OSError: Linux does not say, or the range is gone.
    """
    pages = range(-(-start // HUGE) * HUGE, (start + size) // HUGE * HUGE, HUGE)
    small = HUGE // mmap.PAGESIZE
    # One byte for each small page; its lowest bit counts.
    answer = ctypes.create_string_buffer(len(pages) * small)
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(len(pages) * HUGE)
    if libc.mincore(ctypes.c_void_p(pages.start), length, answer):
        raise OSError(ctypes.get_errno(), "mincore")
    resident = answer.raw
    for number, page in enumerate(pages):
        part = resident[number * small : (number + 1) * small]
        if sum(byte & 1 for byte in part) >= USED * small:
            yield page


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
        try:
            for page in pages_in_use(start, size):
                moved += 0 if advise(page, HUGE, MADV_COLLAPSE) else HUGE
        except OSError as error:
            # Others may give memory back meanwhile.
            logger.debug("h2o: %d MiB stay on small pages: %s", size >> 20, error)
    logger.debug("h2o: %d MiB of %d ranges are on huge pages now", moved >> 20, len(found))
    return moved
