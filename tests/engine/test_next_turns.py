# SPDX-License-Identifier: Apache-2.0
"""Where memory is short, requests that begin anew leave the blocks of an answer to its next turn."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_vllm.blocks.next_turns import STEPS, TURNS_AHEAD
from tests.engine.scheduling import Rig
from tests.engine.test_settled import ASKED, PROMPT, made
from tests.engine.test_settled_waiting import cached, running

OTHER = list(range(5000, 5400))
LONG, SHORT = 60.0, 1e-9
"""Seconds that do not end in a test, and such that only steps count."""


def turn(rig: Rig, name: str, prompt: list[int], max_tokens: int = 8) -> list[int]:
    """Serve a turn to its end. Returns the prompt and the answer: the next turn begins with it."""
    rig.add(name, prompt, ASKED, max_tokens=max_tokens)
    while len(rig.tokens[name]) < max_tokens:
        rig.step()
    return [*prompt, *rig.tokens[name]]


def crowd(model_dir: str, seconds: float, **options: Any) -> tuple[Rig, list[int]]:
    """A pool that holds one conversation, whose first turn has ended while another one waits."""
    rig = made(model_dir, 34, kv_turn_seconds=seconds, **options)
    rig.add("first", PROMPT, ASKED)
    rig.step()
    rig.add("anew", OTHER, ASKED, max_tokens=20)
    while not rig.reports:
        rig.step()
    assert running(rig) == []
    return rig, [*PROMPT, *rig.tokens["first"]]


@pytest.mark.parametrize("options", [{}, {"pipelined": True}, {"drafts": 4}], ids=str)
def test_a_next_turn_reads_what_its_answer_left(model_dir: str, options: dict[str, Any]) -> None:
    rig, said = crowd(model_dir, SHORT, **options)
    rig.add("second", [*said, *range(20)], ASKED)
    rig.step()
    assert running(rig) == ["second"]
    rig.run()
    assert cached(rig, "second") == 400 and cached(rig, "anew") == 0


def test_without_it_the_next_turn_computes_its_prompt_again(model_dir: str) -> None:
    rig, said = crowd(model_dir, 0.0)
    rig.add("second", [*said, *range(20)], ASKED)
    rig.step()
    assert running(rig) == ["anew"]
    rig.run()
    assert cached(rig, "second") == 0


@pytest.mark.parametrize("seconds", [SHORT, LONG])
def test_blocks_are_not_kept_for_ever(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """No turn follows: when the time is over, the other request begins."""
    rig, _ = crowd(model_dir, seconds)
    for _ in range(STEPS):
        rig.step()
        assert running(rig) == []
    if seconds == LONG:
        rig.step()
        assert running(rig) == []
        monkeypatch.setattr("time.monotonic", lambda: 1e12)
    rig.step()
    assert running(rig) == ["anew"]
    rig.run()


@pytest.mark.parametrize("more", [0, 1], ids=["kept", "lost"])
def test_a_turn_that_waits_has_its_blocks_kept(model_dir: str, more: int) -> None:
    """The time is over, but there is no room yet, neither for it nor for the one that came before.

    If a block that it needs is lost, it begins anew as well, behind that one.
    """
    rig, said = crowd(model_dir, SHORT)
    (answer,) = rig.blocks._settled.turns._answers
    others = rig.blocks.block_pool.get_num_free_blocks() - len(answer.needed) + more
    rig.add("plain", range(7000, 7000 + 16 * others - 19), max_tokens=20)
    rig.step()
    rig.add("second", [*said, *range(20)], ASKED)
    while "plain" not in rig.reports:
        rig.step()
        assert running(rig) in (["plain"], [])
    rig.step()
    assert running(rig) == (["anew"] if more else ["second"])
    rig.run()
    assert cached(rig, "second") == (0 if more else 400)


def test_a_request_is_overtaken_by_so_many_turns(model_dir: str) -> None:
    rig, said = crowd(model_dir, LONG)
    turns = 0
    while "anew" not in running(rig):
        turns += 1
        assert turns <= TURNS_AHEAD
        said = turn(rig, f"turn{turns}", [*said, 11], max_tokens=2)
        rig.step()
    assert turns == TURNS_AHEAD
    rig.run()


def test_no_request_waits_while_there_is_room(model_dir: str) -> None:
    rig = made(model_dir, 80, kv_turn_seconds=LONG)
    turn(rig, "first", PROMPT)
    rig.add("anew", OTHER, ASKED)
    rig.step()
    assert running(rig) == ["anew"]
    rig.run()


def test_a_smaller_request_does_not_begin_before_one_that_waits(model_dir: str) -> None:
    """There is room for it, and for one without segments that settle, which waits for no turn."""
    rig, _ = crowd(model_dir, LONG)
    assert rig.blocks.block_pool.get_num_free_blocks() == 33
    rig.add("small", OTHER[:170], ASKED)
    rig.add("plain", range(7000, 7020))
    rig.step()
    assert running(rig) == ["plain"]
    while "plain" not in rig.reports:
        rig.step()
    assert running(rig) == []


def test_a_request_of_another_lineage_or_branch_is_no_next_turn(model_dir: str) -> None:
    """What they share is the system prompt."""
    rig, said = crowd(model_dir, LONG)
    rig.add("protected", [*said, *range(20)], ASKED | {"kv_protect": 48})
    rig.add("branch", [*said[:48], *range(300)], ASKED)
    rig.step()
    assert running(rig) == []
    rig.add("second", [*said, *range(20)], ASKED)
    rig.step()
    assert running(rig) == ["second"]


def test_a_turn_without_the_answer_is_a_next_turn(model_dir: str) -> None:
    """So clients may leave out what was thought: what was held for them is kept as well."""
    rig = made(model_dir, 32, kv_turn_seconds=LONG)
    rig.add("first", PROMPT[:390], ASKED, max_tokens=150)
    rig.step()
    rig.add("anew", OTHER, ASKED)
    while not rig.reports:
        rig.step()
    assert running(rig) == []
    rig.add("second", [*PROMPT[:390], *range(60)], ASKED)
    rig.step()
    assert running(rig) == ["second"]
    while "second" not in rig.reports:
        rig.step()
    assert cached(rig, "second") == 384


def test_one_that_was_preempted_waits_for_no_turn(model_dir: str) -> None:
    rig = made(model_dir, 60, kv_turn_seconds=LONG)
    rig.add("old", OTHER[:150], ASKED, max_tokens=100)
    while not rig.tokens["old"]:
        rig.step()
    said = turn(rig, "first", PROMPT)
    rig.take(leave=0)
    while not rig.preemptions:
        rig.step()
    rig.give_back()
    rig.step()
    assert running(rig) == ["old"] and len(said) == 408
    rig.run()


def test_priorities_decide_alone(model_dir: str) -> None:
    rig = made(model_dir, 34, kv_turn_seconds=LONG, policy="priority")
    said = turn(rig, "first", PROMPT)
    rig.add("anew", OTHER, ASKED)
    rig.add("second", [*said, *range(20)], ASKED, priority=1)
    rig.step()
    assert running(rig) == ["anew"]
    rig.run()
