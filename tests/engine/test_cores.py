# SPDX-License-Identifier: Apache-2.0
"""Cores that others use as well: noticed, said, and answered by threads that sleep when they wait."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from h2o_vllm.engine.cpu import cores
from h2o_vllm.engine.cpu.cores import Times


@pytest.mark.parametrize(
    ("ran", "waited", "share"),
    [(1.6, 0.4, 0.2), (0.02, 0.05, None), (2.0, 0.0, 0.0), (-5.0, -1.0, None)],
    ids=["shares", "idle", "alone", "threads-ended"],
)
def test_share_counts_where_the_process_computed(
    ran: float, waited: float, share: float | None
) -> None:
    assert Times(100 + ran, 50 + waited).waiting_share(Times(100, 50)) == pytest.approx(share)


COMPETE = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
from h2o_vllm.engine.cpu.cores import Times
print("ready", flush=True)
before, end = Times.now(), time.monotonic() + 3
while time.monotonic() < end:
    pass
print(Times.now().waiting_share(before) or 0)
"""


def test_linux_tells_who_shares_a_core() -> None:
    """Two processes on one core: each waits for about half of the time, whatever else runs."""
    if Times.now() is None:
        pytest.skip("no schedstat here")
    core = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-c", COMPETE, core]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(float(share) > 0.3 for _, share in said), said


def test_threads_that_give_way_do_not_count() -> None:
    """Nor do they make the process look busy: what they wait for is the process itself."""
    if Times.now() is None:
        pytest.skip("no schedstat here")

    ran: list[float] = []

    def work(nice: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), usual + nice)
        before = Times.now()
        assert before is not None
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass
        now = Times.now()
        assert now is not None
        ran.append(now.ran - before.ran)

    usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
    for nice in (0, 1):
        thread = threading.Thread(target=work, args=(nice,))
        thread.start()
        thread.join()
    counts, gives_way = ran
    assert counts > 0.29
    # Other threads of this process may have run as well, not for that long.
    assert gives_way < 0.2


class Notes:
    """Stands in for a passive wait: when it began and ended, by the number of windows seen."""

    def __init__(self) -> None:
        self.seen, self.begun, self.ended = 0, [], []  # type: ignore[var-annotated]

    def begin(self) -> None:
        self.begun.append(self.seen)

    def end(self) -> None:
        self.ended.append(self.seen)


def watched(waited: list[float | None], passive: Any) -> None:
    """What ``_watch`` makes of windows of two cores, of which the model waited so long; ``None``: idle."""
    ran = sum_waited = 0.0
    moments: list[Times | None] = [Times(0, 0)]
    for one in waited:
        ran, sum_waited = (ran, sum_waited) if one is None else (ran + 2 - one, sum_waited + one)
        moments.append(Times(ran, sum_waited))
    given = iter([*moments, None])

    def window(_: float) -> None:
        if isinstance(passive, Notes):
            passive.seen += 1

    cores._watch(passive, lambda: next(given), window)


def test_threads_sleep_while_others_are_there_and_no_longer() -> None:
    notes = Notes()
    # Alone, with a moment of somebody else's; idle; busy; half of a core in use; alone again.
    alone, idle, busy, between = [0.1, 0.2, 0.1, 0.9, 0.1], [None] * 2, [0.9] * 5, [0.5] * 4
    watched([*alone, *idle, *busy, *between, *[0.1] * 3], notes)
    # Two windows of work are judged together, by their mean.
    assert notes.ended == [2, 3, 17, 18, 19]
    assert notes.begun == [9, 10, 11, 12, 13]


def test_one_warning_names_the_share_and_the_switches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    # A logger that vLLM configures nowhere: its own stop propagating at some time.
    logger = logging.getLogger("test-cores")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(cores, "logger", logger)
    # Busy, and busy still within the quiet time.
    watched([0.8] * 6, None)
    # An engine that lives in this process has a thread that watches, too.
    (record,) = [one for one in caplog.records if one.thread == threading.get_ident()]
    said = record.getMessage()
    assert "40 %" in said and "2 cores" in said and "last 2 s" in said
    assert "OMP_NUM_THREADS=1" in said and "VLLM_CPU_NUM_OF_RESERVED_CPU=1" in said


def test_nobody_watches_where_linux_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Times, "now", lambda: None)
    assert cores.watch(None) is None
