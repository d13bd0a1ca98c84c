# SPDX-License-Identifier: Apache-2.0
"""Where a process stands, for its server to read. Any process of a server; stdlib only, Linux.

A process that may stand still keeps a file in memory, into which its Python stack goes on :data:`SIGNAL`,
also while it is inside a C library. The server sends the signal and finds the file in ``/proc``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

__all__ = ["install", "of"]

SIGNAL = signal.SIGUSR2
NAME = "h2o-stack"

WRITTEN_SECONDS = 0.3
"""How long a signal handler may take to write a stack."""

_file: int | None = None


def install() -> None:
    """Have this process, and those forked from it, show where it stands. Twice is the same as once."""
    global _file  # noqa: PLW0603 - one per process, like the signal
    if _file is None:
        _file = os.memfd_create(NAME)
        faulthandler.register(SIGNAL, _file)


def of(pid: int) -> str | None:
    """The Python stacks of a process's threads; ``None`` if it shows none."""
    try:
        if not _catches(pid):
            return None
        files = [link for link in Path(f"/proc/{pid}/fd").iterdir() if NAME in str(link.readlink())]
        # Forked processes share the file: what stands there already may be of another one.
        before = [file.stat().st_size for file in files]
        os.kill(pid, SIGNAL)
        time.sleep(WRITTEN_SECONDS)
        return "".join(
            file.read_text(errors="replace")[size:]
            for file, size in zip(files, before, strict=True)
        )
    except OSError:
        return None


def _catches(pid: int) -> bool:
    """Whether the signal would not end the process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (SIGNAL - 1) & 1)
    return False
