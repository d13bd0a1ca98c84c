# SPDX-License-Identifier: Apache-2.0
"""Where memory is short, requests that begin anew leave the blocks of an answer to its next turn."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from h2o_vllm.blocks.manager import retained_answers
from h2o_vllm.blocks.manager.retained_answers import STEPS, TURNS_AHEAD
from tests.engine.scheduling import Rig
from tests.engine.test_settled import ASKED, PROMPT, made
from tests.engine.test_settled_waiting import running

OTHER = list(range(5000, 5400))
LONG, SHORT = 60.0, 1e-9
"""Seconds that do not end in a test, and such that only steps count."""


def turn(rig: Rig, name: str, prompt: list[int], max_tokens: int = 8) -> list[int]:
    """Serve a turn to its end. Returns the prompt and the answer: the next turn begins with it."""
    rig.add(name, prompt, ASKED, max_tokens=max_tokens)
    while len(rig.tokens[name]) < max_tokens:
        rig.step()
    return [*prompt, *rig.tokens[name]]


def crowd(
    model_dir: str, seconds: float, asked: Any = ASKED, **options: Any
) -> tuple[Rig, list[int]]:
    """A pool that holds one conversation, whose first turn has ended while another one waits."""
    rig = made(model_dir, 34, kv_turn_seconds=seconds, **options)
    rig.add("first", PROMPT, asked)
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
    assert rig.report("second")["tokens_cached"] == 400 and rig.report("anew")["tokens_cached"] == 0


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
    (answer,) = rig.blocks.settled.answers._answers
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
    assert rig.report("second")["tokens_cached"] == (0 if more else 400)


def test_each_request_is_overtaken_by_so_many_turns(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are not the first to wait."""
    monkeypatch.setattr(retained_answers, "TURNS_AHEAD", ahead := 3)
    rig, said = crowd(model_dir, SHORT)
    for number in range(2):
        rig.add(f"later{number}", range(20_000 + 1000 * number, 20_400 + 1000 * number), ASKED)
    began: dict[str, int] = {}
    for count in range(1, ahead + 4):
        said, name = [*said, 11], f"turn{count}"
        rig.add(name, said, ASKED, max_tokens=2)
        while len(rig.tokens[name]) < 2:
            began |= {one.req_id: count for one in rig.step().scheduled_new_reqs}
        said += rig.tokens[name]
    assert {began[name] for name in ("anew", "later0", "later1")} == {ahead + 1}


def test_turns_that_have_lost_their_blocks_are_counted(model_dir: str) -> None:
    """Requests of which nothing settles take the blocks of each turn before it is admitted."""
    rig, said = crowd(model_dir, SHORT)
    plain = turns = 0
    rig.add("turn0", [*said, 11], ASKED, max_tokens=2)
    for _ in range(300):
        if not any(one.request_id.startswith("plain") for one in rig.scheduler.waiting):
            plain += 1
            rig.add(f"plain{plain}", range(300 * plain, 300 * plain + 160), max_tokens=12)
        rig.step()
        if f"turn{turns}" in rig.reports:
            said, turns = [*said, 11, *rig.tokens[f"turn{turns}"]], turns + 1
            rig.add(f"turn{turns}", [*said, 11], ASKED, max_tokens=2)
        if "anew" in running(rig):
            break
    assert "anew" in running(rig) and turns <= TURNS_AHEAD


def test_a_reader_of_what_others_hold_does_not_wait(model_dir: str) -> None:
    """Blocks that it shares with a running request are not taken from the free ones."""
    rig = made(model_dir, 53, kv_turn_seconds=LONG)
    rig.add("reader", PROMPT, ASKED, max_tokens=200)
    while len(rig.tokens["reader"]) < 2:
        rig.step()
    turn(rig, "other", OTHER, max_tokens=4)
    rig.add("new", [*PROMPT, *range(100, 120)], ASKED, max_tokens=4)
    rig.step()
    assert running(rig) == ["reader", "new"]


def test_of_conversations_about_one_document_the_right_one_goes_on(model_dir: str) -> None:
    rig = made(model_dir, 120, kv_turn_seconds=LONG)
    document = [*PROMPT[:300]]
    first = turn(rig, "first", [*document, *range(100, 160)])
    turn(rig, "other", [*document, *range(200, 260)])
    one, two = rig.blocks.settled.answers._answers
    rig.add("second", [*first, *range(20)], ASKED)
    left = rig.blocks.settled.answers._answers
    assert one not in left and two in left
    rig.run()


def test_a_turn_that_cannot_be_admitted_keeps_nothing_from_others(model_dir: str) -> None:
    """Its grammar is not ready, and nothing runs."""
    rig, said = crowd(model_dir, SHORT)
    second = rig.add("second", [*said, *range(20)], ASKED)
    second.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    for _ in range(2 * STEPS):
        rig.step()
    assert running(rig) == ["anew"]


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


@pytest.mark.parametrize(("protect", "common", "found"), [(48, 48, 48), (0, 336, 336)])
def test_a_request_of_another_lineage_or_branch_is_no_next_turn(
    model_dir: str, protect: int, common: int, found: int
) -> None:
    """What the branch finds is the system prompt, protected or settled."""
    asked = ASKED | {"kv_protect": protect}
    rig, said = crowd(model_dir, LONG, asked)
    rig.add("other", [*said, *range(20)], ASKED | {"kv_protect": 16})
    rig.add("branch", [*said[:common], *range(200)], asked)
    assert rig.blocks.settled.lookup(rig.blocks.settled.states["branch"], 400)[1] == found
    rig.step()
    assert running(rig) == []
    rig.add("second", [*said, *range(20)], asked)
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
    assert rig.report("second")["tokens_cached"] == 384


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
