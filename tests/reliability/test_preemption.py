# SPDX-License-Identifier: Apache-2.0
"""A request that is preempted in the very step in which it evicts: the eviction must not reach the workers.

Only priority scheduling preempts whom it has already scheduled in a step, and only when a more important
request takes more blocks than the eviction has freed: too rare for the state machine to meet it in a minute.
"""

from __future__ import annotations

from typing import Any

import pytest

from h2o_vllm.blocks.manager import H2OBlockManager
from tests.engine.scheduling import Rig


def meet(model_dir: str, monkeypatch: pytest.MonkeyPatch, *, cancels: bool) -> tuple[int, int]:
    """How often it was met, and how many steps it took; every step's plan is checked by the rig."""
    pop, met = H2OBlockManager.pop_blocks_for_free, 0

    def popping(self: H2OBlockManager, request_id: str) -> Any:
        nonlocal met
        pending = self._evictions.get(request_id)
        blocks = pop(self, request_id)
        if pending is not None:
            met += 1
            if not cancels:
                self._evictions[request_id] = pending
        return blocks

    monkeypatch.setattr(H2OBlockManager, "pop_blocks_for_free", popping)
    rig = Rig(model_dir, 28, policy="priority", kv_min_tokens=16, caching=False, max_num_seqs=4)
    for number in range(3):
        prompt = range(1000 * number, 1000 * number + 90 + 11 * number)
        rig.add(f"slow{number}", prompt, {"kv_budget": 0.4}, max_tokens=200, priority=9 - number)
    steps = 0
    for number in range(120):
        prompt = range(5000, 5100 + 7 * (number % 23))
        rig.add(f"fast{number}", prompt, max_tokens=2)
        for _ in range(5 + number % 7):
            rig.step()
            steps += 1
    steps += rig.run(4000)
    assert all(len(rig.tokens[f"slow{number}"]) == 200 for number in range(3))
    return met, steps


def test_preemption_cancels_the_eviction_of_the_same_step(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, steps = meet(model_dir, monkeypatch, cancels=True)
    print(f"met {met} times in {steps} steps")
    assert met > 0


def test_an_eviction_that_outlives_its_request_is_found(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((AssertionError, LookupError)):
        meet(model_dir, monkeypatch, cancels=False)
