# SPDX-License-Identifier: Apache-2.0
"""Cores that others use as well: how threads wait, and that somebody says so."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from h2o_vllm.engine.cpu import cores
from h2o_vllm.engine.cpu.cores import Times


@pytest.mark.parametrize(
    ("count", "given", "expected"),
    [
        pytest.param(2, {}, {"GOMP_SPINCOUNT": cores.SPINS}, id="few"),
        pytest.param(5, {}, {}, id="many"),
        pytest.param(2, {"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}, id="spins"),
        pytest.param(2, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}, id="policy"),
    ],
)
def test_threads_wait_briefly_on_few_cores_unless_the_user_says_how(
    count: int, given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    environment = dict(given)
    cores.wait_briefly(environment)
    assert environment == expected


@pytest.mark.parametrize(
    ("ran", "waited", "share"),
    [(8.0, 2.0, 0.2), (0.3, 0.5, 0.0), (10.0, 0.0, 0.0), (-5.0, -1.0, 0.0)],
    ids=["shares", "idle", "alone", "threads-ended"],
)
def test_share_counts_where_the_process_computed(ran: float, waited: float, share: float) -> None:
    assert Times(100 + ran, 50 + waited).waiting_share(Times(100, 50)) == pytest.approx(share)


COMPETE = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
from h2o_vllm.engine.cpu.cores import Times
print("ready", flush=True)
before, end = Times.now(), time.monotonic() + 3
while time.monotonic() < end:
    pass
print(Times.now().waiting_share(before))
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


def test_one_warning_names_the_share_and_the_switches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Busy, then busy again within the quiet time, then the end of the test.
    moments = iter([Times(0, 0), Times(7, 3), Times(14, 6), None])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    # A logger that vLLM configures nowhere: its own stop propagating at some time.
    logger = logging.getLogger("test-cores")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(cores, "logger", logger)
    cores._watch(lambda: next(moments), lambda _: None)
    # An engine that lives in this process has a thread that watches, too.
    (record,) = [one for one in caplog.records if one.thread == threading.get_ident()]
    said = record.getMessage()
    assert "30 %" in said and "2 cores" in said
    assert "OMP_NUM_THREADS=1" in said and "VLLM_CPU_NUM_OF_RESERVED_CPU=1" in said


def test_nobody_watches_where_linux_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Times, "now", lambda: None)
    assert cores.watch() is None
