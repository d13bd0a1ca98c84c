# SPDX-License-Identifier: Apache-2.0
"""How OpenMP's threads wait for each other: who says so, and what changes it."""

from __future__ import annotations

import os
import subprocess
import sys

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
from h2o_vllm.engine.cpu.waiting import Restraint, _operation
import torch

def threads(expected):
    end = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) != expected and time.monotonic() < end:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
_operation()
alone = len(os.listdir("/proc/self/task"))
restraint = Restraint()
for _ in range(2):
    restraint.begin()
    restraint.begin()
    print(threads(alone + 2) - alone, restraint.lasts)
    restraint.end()
    restraint.end()
    print(threads(alone) - alone, restraint.lasts)
"""


def test_a_restraint_is_a_team_that_does_nothing_and_leaves_nothing() -> None:
    """OpenMP counts the teams' threads, and lets all sleep where there are more than cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", RESTRAIN]
    said = subprocess.check_output(command, env=environment, text=True, timeout=120)
    assert said.splitlines() == ["2 True", "0 False"] * 2


@pytest.mark.parametrize("spinning", [30.0, 50.0], ids=["pays", "costs"])
def test_spinning_pays_where_operations_are_faster_for_it(
    spinning: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two cores that are one to the processor they are not."""
    restraint = waiting.Restraint()
    monkeypatch.setattr(waiting, "_rounds", lambda _: 40.0 if restraint.lasts else spinning)
    assert waiting.spinning_pays(restraint) == (spinning < 40)
    assert not restraint.lasts


@pytest.mark.parametrize(
    ("ours", "pays", "watched", "begun"),
    [(True, True, True, False), (True, False, False, True), (False, True, False, False)],
    ids=["watches", "sleeps-always", "the-user-says-how"],
)
def test_the_engine_chooses_how_threads_wait(
    ours: bool, pays: bool, watched: bool, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", waiting.SPINS if ours else "300000")
    given: list[waiting.Restraint | None] = []
    made: list[waiting.Restraint] = []
    monkeypatch.setattr(executor, "watch", given.append)
    monkeypatch.setattr(executor, "spinning_pays", lambda one: made.append(one) or pays)
    executor.watch_cores()
    assert [one is not None for one in given] == [watched]
    assert [one.lasts for one in made] == ([begun] if ours else [])
    for one in made:
        one.end()
