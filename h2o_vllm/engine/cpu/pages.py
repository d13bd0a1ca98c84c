# SPDX-License-Identifier: Apache-2.0
"""KV memory on huge pages, which is zeroed while the server already serves. Runs in each CPU worker.

vLLM allocates the pool with ``torch.zeros`` (0.32), which writes all of it before the start goes on: a second
for each few gigabytes, and many in a virtual machine whose host has to find the memory first. Fresh pages of
the kernel are zero anyway. A thread then takes them, so that memory which was asked for is had soon, and does
not turn out to be missing hours later.

They are huge where Linux gives them (``/sys/kernel/mm/transparent_hugepage/enabled``): a sequence's blocks
lie anywhere in the pool, and the address of a page of 4 KiB takes as long to look up as the page to read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

__all__ = ["ZeroPages", "advise", "in_background", "populate"]

LARGE = 1 << 26
"""Bytes from which on it is worth while."""

STEP = 1 << 21
"""Short, as threads that want memory have to wait for its end, and it may be let in seldom."""

PAUSE_SECONDS = 0.001
"""After each step, for as long as the step took and this much: half of a core is left to requests."""

NICE = 19
"""Requests go first: on two cores they would have waited for a seventh of their time."""

MADV_POPULATE_WRITE = 23
"""``linux/mman.h``, Linux 5.14: take the pages, as a write would, and change nothing."""


class ZeroPages(TorchFunctionMode):
    """Within this context a large ``torch.zeros`` of bytes is fresh pages, which a thread takes later."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As torch, but for what :func:`torch.zeros` of vLLM's ``allocate_kv_cache`` looks like."""
        del types
        kwargs = kwargs or {}
        if func is not torch.zeros or not _is_pool(*args, **kwargs):
            return func(*args, **kwargs)
        pages = mmap.mmap(-1, args[0], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            logger.debug("h2o: no huge pages for the KV pool: %s", error.strerror)
        pool = torch.frombuffer(pages, dtype=torch.int8)
        in_background(lambda: populate(pool))
        return pool


def in_background(work: Callable[[], object]) -> None:
    """Do something to memory in a thread that gives way to requests."""

    def give_way() -> None:
        # Linux has it of a thread, not of the process.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        work()

    threading.Thread(target=give_way, name="h2o-pages", daemon=True).start()


def _is_pool(*args: Any, dtype: Any = None, device: Any = "cpu", **others: Any) -> bool:
    if others or len(args) != 1 or dtype is not torch.int8 or torch.device(device).type != "cpu":
        return False
    return isinstance(args[0], int) and args[0] >= LARGE


def populate(pool: torch.Tensor) -> int:
    """Take the pages under ``pool``, a part at a time; returns the bytes taken, all unless Linux cannot.

    Holds no lock of Python's, and changes no byte: requests may be using the pool.
    """
    address, size = pool.data_ptr(), pool.nbytes
    for start in range(0, size, STEP):
        error = advise(address + start, min(STEP, size - start), MADV_POPULATE_WRITE)
        if error:
            logger.debug("h2o: pages are taken when used: %s", os.strerror(error))
            return start
    return size


def advise(address: int, length: int, advice: int) -> int:
    """``madvise`` for a short stretch of memory, and then a pause; returns the error's number, 0 for none."""
    libc, begun = ctypes.CDLL(None, use_errno=True), time.monotonic()
    failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)
    error = ctypes.get_errno() if failed else 0
    time.sleep(time.monotonic() - begun + PAUSE_SECONDS)
    return error
