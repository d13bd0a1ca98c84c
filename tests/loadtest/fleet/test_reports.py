# SPDX-License-Identifier: Apache-2.0
"""The commands' tables, and the prompts of conversations."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.fleet import failures, sessions, uneven, upgrade
from loadtest.fleet.incidents import INCIDENTS

ORIGIN = {"command": "c", "machine": "m", "commit": "1", "date": "d", "versions": {"vllm": "1"}}


def test_failures_have_a_line_each_and_say_how_requests_failed() -> None:
    common = ORIGIN | {
        "requests": 100, "answered": 98, "refused": 1, "broken": 1, "repeated": 3, "twice": 0,
        "slowest": 1.23, "back_s": 21.4,
    }  # fmt: skip
    rows = [
        common | {"incident": "drain", "noticed": 0, "errors": {"": 2}},
        common | {"incident": "router", "noticed": None, "errors": {"gone": 2}},
    ]
    text = failures.markdown(rows)
    drain, router = INCIDENTS["drain"].says, INCIDENTS["router"].says
    assert f"| {drain} | 100 | 98 | 1 | 1 | 0 | 3 | 0 | 21 s | 1.2 s |" in text
    assert f"| {router} | 100 | 98 | 1 | 1 |  | 3 | 0 | 21 s | 1.2 s |" in text
    assert f"* {drain}: the stream ended: 2" in text
    assert f"* {router}: gone: 2" in text


def test_each_prompt_of_a_conversation_begins_with_the_one_before() -> None:
    args = sessions.parse_arguments(["--turns", "4"])
    text = "".join(chr(33 + number % 90) for number in range(200_000))
    first, second = (sessions.prompts_of(text, number, args) for number in (0, 1))
    for one, following in itertools.pairwise(first):
        assert following.startswith(one)
        assert len(following) > len(one)
    shared = round(args.shared * sessions.CHARS_PER_TOKEN)
    assert len(first) == 4
    assert first[0][:shared] == second[0][:shared]
    assert first[0][shared:] != second[0][shared:]


def test_conversations_are_compared_behind_their_first_turn() -> None:
    turns = [(1, 5.0, 0), (2, 1.0, 450), (3, 2.0, 900)]
    rows = [
        ORIGIN | {"policy": "cache_aware", "turn": turn, "ttft": ttft, "prompt_tokens": 900,
                  "tokens_cached": cached}
        for turn, ttft, cached in turns
    ]  # fmt: skip
    line = "| `cache_aware` | 5.00 | 1.50 (1.00-2.00) | 75 % |"
    assert line in sessions.markdown(rows)


def test_unequal_replicas_are_counted_one_by_one() -> None:
    row = ORIGIN | {"policy": "power_of_two", "taken": [10.0, 38.0], "tok_per_s": 12.34}
    assert "| `power_of_two` | 10 | 38 | 12.3 |" in uneven.markdown([row])


def test_an_upgrade_says_which_version_answered_how_many() -> None:
    row = ORIGIN | {
        "way": "upgrade", "before": ["0.1.0", "0.1.0"], "after": ["0.2.0", "0.2.0"], "requests": 100,
        "answered": 99, "answered_by": {"0.2.0": 40, "0.1.0": 59}, "refused": 0, "broken": 1, "repeated": 0,
        "twice": 0, "seconds": 120.4, "slowest": 2.25,
    }  # fmt: skip
    line = "| upgrade: 0.1.0 to 0.2.0 | 100 | 99 | 0.1.0: 59, 0.2.0: 40 | 0 | 1 | 0 | 0 | 120 s | 2.2 s |"
    assert line in upgrade.markdown([row])


def test_a_version_is_not_compared_with_itself(tmp_path: Path) -> None:
    same = Path(sys.executable).with_name("h2o-serve")
    with pytest.raises(SystemExit, match=r"--to is h2o-serve \S+ \(vLLM \S+\) too"):
        upgrade.main(["--to", str(same), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="false is no h2o-serve"):
        upgrade.main(["--to", "/bin/false", "--out", str(tmp_path)])


def test_replicas_are_upgraded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[object, ...]] = []
    replicas = [SimpleNamespace(program=["old"]), SimpleNamespace(program=["old"])]
    fleet: Any = SimpleNamespace(
        replicas=replicas, wait_until_served=lambda *served: done.append(("served", *served))
    )

    def drain(fleet: Any, number: int) -> None:
        done.append(("drained", number, *(replica.program[0] for replica in fleet.replicas)))

    monkeypatch.setattr(upgrade, "drain", drain)
    upgrade.roll(fleet, ["new"])()
    assert done == [
        ("drained", 0, "new", "old"), ("served", 0, 1), ("drained", 1, "new", "new"), ("served", 1, 1),
    ]  # fmt: skip
