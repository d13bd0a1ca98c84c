# SPDX-License-Identifier: Apache-2.0
"""Laws 1 to 3 and 5 to 7 of chats whose segments settle, in any order of events, on ghost memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.traffic_chats import Chats


def run(examples: int, steps: int, *, derandomize: bool = True, phases: Any = Phase) -> None:
    run_state_machine_as_test(
        Chats,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            phases=list(phases),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_chats_in_any_order_keep_the_laws(
    model_dir: str, long: bool, pytestconfig: pytest.Config
) -> None:
    Chats.model_dir = model_dir
    unwanted = {Phase.shrink} if pytestconfig.getoption("--no-shrink") else set()
    phases = [phase for phase in Phase if phase not in unwanted]
    run(3000 if long else 80, 60 if long else 30, derandomize=not long, phases=phases)
    print(
        f"{Chats.turns} turns, {Chats.settled} segments settled, {Chats.found} found, "
        f"{Chats.resumed} resumed behind one, {Chats.shared} times two held one, {Chats.shortages} shortages"
    )
    assert Chats.turns > 200
    assert Chats.settled > 100
    assert Chats.found > 10
    assert Chats.resumed > 20
    assert Chats.shared > 10
