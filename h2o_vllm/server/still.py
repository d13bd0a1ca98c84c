# SPDX-License-Identifier: Apache-2.0
"""A start that stands still is noticed, said, and ended. A thread of the process the user starts; Linux.

While a server starts, its processes compute, read, or wait for a disk. If for :data:`LIMIT_SECONDS` none of
them does, nothing will come of it: the stacks of all go into a file, and a line of the log names it. An
engine is then ended, so that the server can start another one; a server that waits for none ends itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple, Self

from h2o_vllm.engine import stacks

__all__ = ["StartWatch", "StoodStillError"]

LIMIT = "H2O_STILL_SECONDS"
"""Environment variable for tests: another limit; 0: none."""

LIMIT_SECONDS = 30.0

LOOKS = 15
"""So often within the limit: what a suspended machine misses does not count."""

TICKS = 2
"""Less of the system's clock ticks (10 ms) of computing within the limit is none: others poll."""

POLLERS = ("gloo_tcp_loop",)
"""Threads that look for work a hundred times a second as long as they live. They show nothing of a start."""

STDLIB = str(Path(threading.__file__).parent)

SLEEPING = "SIZXTt"
"""States in which a thread neither runs nor waits for a core or for a disk (``proc_pid_stat(5)``)."""


class StoodStillError(RuntimeError):
    """The engine stood still, twice."""


class Sight(NamedTuple):
    """What the processes of a start have done so far.

    Attributes:
        ticks: of computing.
        read: bytes from disks, and pages that had to be fetched from there.
        waits: whether a thread runs, or waits for a core, a disk or another program's file lock.
    """

    ticks: int
    read: int
    waits: bool

    def moved_since(self, before: Sight) -> bool:
        """Whether anything has been done between the two, or is about to be."""
        # Processes that end take their ticks along.
        return self.waits or self.read != before.read or abs(self.ticks - before.ticks) >= TICKS


class StartWatch:
    """Within this context, or until :meth:`end`, this process and its children are watched."""

    def __init__(self, limit: float | None = None) -> None:
        self._limit = float(os.environ.get(LIMIT) or LIMIT_SECONDS) if limit is None else limit
        self._up = threading.Event()
        self._engine = threading.Event()
        self._thread: threading.Thread | None = None
        self.ended: str | None = None
        """Where an engine stood that was ended."""

    def __enter__(self) -> Self:
        """Watch from now on, if there is a limit and Linux says what processes do."""
        if self._limit > 0 and Path("/proc/self/stat").exists():
            self._thread = threading.Thread(target=self._watch, name="h2o-still", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def engine_starts(self) -> None:
        """From now on it is an engine that the server waits for."""
        self.ended = None
        self._engine.set()

    def engine_is_up(self) -> None:
        """From now on the server waits for nothing but itself."""
        self._engine.clear()

    def end(self) -> None:
        """The server is up, or will not be."""
        self._up.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        before, quiet = look(), 0
        while not self._up.wait(self._limit / LOOKS):
            now = look()
            if now.moved_since(before):
                before, quiet = now, 0
            elif (quiet := quiet + 1) >= LOOKS:
                self._stand_still()
                before, quiet = look(), 0

    def _stand_still(self) -> None:
        pids, file, where = descendants(os.getpid()), *report()
        waits = self._engine.is_set() and self.ended is None
        said = (
            f"the {'engine' if waits else 'start'} stands still: no CPU time used for "
            f"{self._limit:g} s; {where} (all stacks: {file})"
        )
        if waits:
            self.ended = said
            self._engine.clear()
        else:
            # The main thread is the one that stands still.
            sys.stderr.write(f"h2o-serve: error: {said}\n")
            sys.stderr.flush()
        for pid in reversed(pids):
            if b"resource_tracker" not in _read(f"/proc/{pid}/cmdline"):
                _kill(pid)
        if not waits:
            os._exit(1)


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on: parents first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(entry / "stat")):
            parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def look() -> Sight:
    """What this process and its descendants have done, but for the calling thread."""
    ticks = read = 0
    waits = False
    pids = [os.getpid(), *descendants(os.getpid())]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            fields = _stat(task / "stat")
            if not fields or int(task.name) == threading.get_native_id():
                continue
            if _read(task / "comm").decode(errors="replace").strip() not in POLLERS:
                ticks += int(fields[11]) + int(fields[12])
                read += int(fields[9])
                waits |= fields[0] not in SLEEPING
        for line in _read(f"/proc/{pid}/io").decode().splitlines():
            name, _, value = line.partition(":")
            # This process reads /proc.
            if name == "read_bytes" or (name == "rchar" and pid != pids[0]):
                read += int(value)
    return Sight(ticks, read, waits or _wait_for_a_lock(pids))


def _wait_for_a_lock(pids: list[int]) -> bool:
    """Whether one of the processes waits for another program to give up a file (a model being prepared)."""
    waiting = [line.split() for line in _read("/proc/locks").decode().splitlines() if "->" in line]
    return any(fields[5] in map(str, pids) for fields in waiting)


def report() -> tuple[str, str]:
    """Write where all processes stand; the file's name, and where the last one stands."""
    handle, name = tempfile.mkstemp(prefix="h2o-serve-", suffix=".stacks")
    where = "where, Python does not say"
    with os.fdopen(handle, "w") as file:
        file.write(f"h2o-serve (pid {os.getpid()})\n")
        file.flush()
        faulthandler.dump_traceback(file)
        for pid in descendants(os.getpid()):
            called = _read(f"/proc/{pid}/comm").decode().strip()
            stack = stacks.of(pid)
            kernel = _read(f"/proc/{pid}/wchan").decode() or "?"
            file.write(f"\n{called} (pid {pid}), in the kernel: {kernel}\n{stack or 'no stack'}\n")
            if stack and (
                frames := [line.strip() for line in stack.splitlines() if "File " in line]
            ):
                # What waits in Python's own library was called by something.
                telling = [frame for frame in frames if STDLIB not in frame or "-packages" in frame]
                where = f"{called} (pid {pid}) is at {[*telling, *frames][0]}"
    return name, where


def _stat(path: Path) -> list[str]:
    """The fields behind the name, which may hold anything: state, parent, ..."""
    return _read(path).decode(errors="replace").rpartition(")")[2].split()


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
