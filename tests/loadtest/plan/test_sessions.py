# SPDX-License-Identifier: Apache-2.0
"""Sessions on the real scheduler: what the cache gives each turn is what counting by hand says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from loadtest.plan.real import bare_config, dense_scheduler
from loadtest.plan.sessions import Turns, idle, main, serve
from loadtest.plan.simulate import Step

TURNS = Turns(count=6, new=200, answer=40)
STOCK = {"kv_budget": 1.0}
SETTLED = {"kv_budget": 0.2, "kv_policy": "later", "kv_settle_tokens": 512}


def made(pool: int, max_seqs: int = 16) -> Any:
    return dense_scheduler(bare_config(16, TURNS.longest + 16, max_seqs, 2048), pool)


def second(_: Step) -> float:
    return 1.0


def test_a_turn_finds_all_that_was_said_and_takes_a_step_a_token() -> None:
    turns = Turns(6, 200, 40, pause=2.0)
    found = serve(made(10_000), 3, turns, STOCK, second)
    assert found.asked == [200 + 240 * (n // 3) for n in range(18)]
    # The last token of an answer has no KV.
    assert found.cached == [max(0, 240 * (n // 3) - 1) // 16 * 16 for n in range(18)]
    assert found.first_s == [1.0] * 18
    assert (found.seconds, found.steps, found.preemptions) == (6 * 40 + 5 * 2, 240, 0)


def test_a_budget_forgets_and_what_settles_is_found() -> None:
    found = serve(made(10_000), 1, TURNS, {"kv_budget": 0.2, "kv_protect": 0}, second)
    assert found.cached == [0] * 6
    # The prompts of two turns are short: they are protected, and published.
    found = serve(made(10_000), 1, TURNS, {"kv_budget": 0.2}, second)
    assert found.cached == [0, 224, 0, 0, 0, 0]
    found = serve(made(10_000), 1, TURNS, SETTLED, second)
    for turn, cached in enumerate(found.cached[1:], 1):
        # A hit does not end where a segment is due.
        assert 240 * turn - 32 < cached < 240 * turn


def test_steps_are_counted_by_what_is_held() -> None:
    steps: list[Step] = []

    def note(step: Step) -> float:
        steps.append(step)
        return 1.0

    serve(made(10_000), 1, TURNS, SETTLED, note)
    assert sum(step.prompt for step in steps) < 6 * 200 + 5 * 32
    # At the end 1,439 tokens are seen, 512 and 640 of them at most in the window, of the rest a quarter held.
    assert 512 < steps[-1].read < 640 + 800 / 4 + 32
    assert [step.decodes for step in steps[-39:]] == [1] * 39
    steps.clear()
    serve(made(10_000), 1, TURNS, STOCK, note)
    assert steps[-1].read == TURNS.longest - 1
    assert steps[0] == Step(200, 200 * 201 // 2, 0, 0)


def test_a_thought_that_is_not_sent_back_is_not_found() -> None:
    turns = Turns(3, 200, 40, thought=30)
    found = serve(made(10_000), 1, turns, STOCK, second)
    assert found.asked == [200, 410, 620]
    assert found.cached == [0, 200 // 16 * 16, 410 // 16 * 16]


def test_as_many_idle_sessions_are_found_as_the_pool_has_blocks_for() -> None:
    pool = 90 * 16 * 4 + 16 * 13
    make = partial(made, pool, max_seqs=1)
    # Each holds 90 blocks, the 1,440 tokens that were said.
    assert idle(make, TURNS, STOCK) == 4
    # Some 46 for those that settled, and behind them what each let go in its turn.
    assert 5 <= idle(make, TURNS, SETTLED) <= 8


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        serve(made(1000), 1, TURNS, STOCK, second)


def test_the_command_prints_a_line_per_variant(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--pool-tokens", "3200", "--turns", "4", "--turn", "200+40", "--settle", "256"]
    main([*small, "--sessions", "2", "--pause", "0"])
    stock, alone, settled = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()[-3:]
    )
    assert [line[:2] for line in (stock, alone, settled)] == [
        ["2", "stock"],
        ["2", "budget"],
        ["2", "settled"],
    ]
    assert alone[6] == "0.0%"
    assert float(stock[6][:-1]) > 60 < float(settled[6][:-1])
    main([*small, "--idle"])
    stock_line, settled_line = capsys.readouterr().out.splitlines()[-2:]
    assert int(stock_line.split("|")[2]) == 3
    assert int(settled_line.split("|")[2]) > 3
