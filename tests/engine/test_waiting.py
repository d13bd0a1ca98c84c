# SPDX-License-Identifier: Apache-2.0
"""How OpenMP's threads wait for each other: who says so, and what changes it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from h2o_vllm.engine.cpu import executor, waiting


@pytest.mark.parametrize(
    ("count", "given", "expected"),
    [
        pytest.param(2, {}, {"GOMP_SPINCOUNT": waiting.SPINS}, id="few"),
        pytest.param(5, {}, {}, id="many"),
        pytest.param(2, {"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}, id="spins"),
        pytest.param(2, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}, id="policy"),
    ],
)
def test_threads_spin_briefly_on_few_cores_unless_the_user_says_how(
    count: int, given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    environment = dict(given)
    waiting.spin_briefly(environment)
    assert environment == expected


RESTRAIN = """
import os, time
from h2o_vllm.engine.cpu.waiting import PassiveWait, _operation
import torch

def threads(expected):
    end = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) != expected and time.monotonic() < end:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
_operation()
alone = len(os.listdir("/proc/self/task"))
passive = PassiveWait()
for _ in range(2):
    passive.begin()
    passive.begin()
    print(threads(alone + 2) - alone, passive.lasts)
    passive.end()
    passive.end()
    print(threads(alone) - alone, passive.lasts)
"""


def test_a_passive_wait_is_a_team_that_does_nothing_and_leaves_nothing() -> None:
    """OpenMP counts the teams' threads, and lets all sleep where there are more than cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", RESTRAIN]
    said = subprocess.check_output(command, env=environment, text=True, timeout=120)
    assert said.splitlines() == ["2 True", "0 False"] * 2


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "the-user-says-how"])
def test_cores_are_watched_once_the_engine_is_warm(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", waiting.SPINS if ours else "300000")
    done: list[Any] = []
    base = executor.UniProcExecutor
    monkeypatch.setattr(base, "compile_or_warm_up_model", lambda _: done.append("warm"))
    monkeypatch.setattr(executor, "watch", done.append)
    executor._InEngineCore.compile_or_warm_up_model(object.__new__(executor._InEngineCore))
    assert done[0] == "warm"
    assert [one is not None for one in done[1:]] == [ours]
