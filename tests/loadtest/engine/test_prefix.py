# SPDX-License-Identifier: Apache-2.0
"""The benchmark of shared beginnings: what is planned, whose chats share what, and what the tables say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.engine.prefix import Measurement, planned
from loadtest.engine.prefix_chats import Chat, chats_of
from loadtest.engine.prefix_report import markdown, plot_prefix
from loadtest.engine.prefix_traffic import SETTINGS, TRAFFIC, VARIANTS, serves

ABOUT: dict[str, Any] = {
    "command": "x",
    "machine": "m",
    "versions": {"vllm": "0"},
    "commit": "c",
    "date": "2026-01-01",
}


def test_variants_take_turns_and_say_what_they_mean() -> None:
    plan = list(planned(list(SETTINGS), list(TRAFFIC), list(VARIANTS), 2))
    chats = [one for one in plan if (one.memory, one.traffic) == ("short", "chats")]
    order = list(VARIANTS)
    assert [one.variant for one in chats] == [*order, *reversed(order)]
    # The same as kv_protect there.
    assert not serves("h2o-system", TRAFFIC["system"])
    # What protects nothing, and reads the cache all the same.
    assert VARIANTS["keydiff"].fields(TRAFFIC["n"]) == {"kv_budget": 0.2, "kv_policy": "keydiff"}
    # No system prompt.
    assert not serves("h2o-system", TRAFFIC["n"])
    assert [one.memory for one in plan] == sorted(one.memory for one in plan)


@pytest.mark.parametrize("traffic", TRAFFIC.values(), ids=lambda traffic: traffic.name)
@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_a_chat_fits_the_model(traffic: Any, scale: float) -> None:
    scaled = traffic.scaled(scale)
    assert scaled.longest <= min(setting.max_model_len for setting in SETTINGS.values())
    # One at a time has room in the short pool: nobody waits for ever.
    assert scaled.longest <= (SETTINGS["short"].pool_tokens or 0)


def test_chats_share_the_beginning_and_nothing_else() -> None:
    chats = chats_of(TRAFFIC["chats"], list(range(100_000)))
    beginnings = {tuple(chat.prompt[: TRAFFIC["chats"].shared]) for chat in chats}
    assert len(beginnings) == 1 and len(chats) == 8
    own = [token for chat in chats for token in chat.prompt[TRAFFIC["chats"].shared :]]
    own += [token for chat in chats for turn in chat.later for token in turn]
    assert len(own) == len(set(own)) == 8 * 6 * 120


def test_answers_are_counted_one_by_one_and_the_first_is_gone_on_from() -> None:
    chat = Chat([1, 2, 3], [[9]])
    for index, tokens in ((0, [7]), (1, [5]), (0, [7, 8]), (1, [5, 6, 4])):
        reply = SimpleNamespace(index=index, token_ids=tokens)
        chat.hears(SimpleNamespace(outputs=[reply], num_cached_tokens=2 * index))
    assert chat.next_turn()
    assert chat.prompt == [1, 2, 3, 7, 8, 9]
    assert (chat.output_tokens, chat.prompt_tokens, chat.cached_tokens) == (5, 6, 2)
    assert not chat.replies
    chat.hears(
        SimpleNamespace(outputs=[SimpleNamespace(index=0, token_ids=[])], num_cached_tokens=4)
    )
    assert not chat.next_turn()


def test_ratio_is_taken_within_a_round(tmp_path: Path) -> None:
    rows = [
        ABOUT | row_of(round_number, variant, speed)
        for round_number, variant, speed in (
            (0, "stock", 100.0), (0, "h2o", 200.0), (1, "h2o", 270.0), (1, "stock", 90.0),
        )
    ]  # fmt: skip
    assert Measurement("short", 0, "n", "h2o").measured_by(rows[1])
    text = markdown(rows)
    assert "| n | short | vLLM defaults | 2.50 (2.00-3.00) | 0.50 (0.50-0.50) |" in text
    assert "| n | short | kv_protect | 235.0 | 0.50 |" in text
    assert plot_prefix(rows, tmp_path / "picture.png").stat().st_size > 1000


def row_of(number: int, variant: str, speed: float) -> dict[str, Any]:
    first = 0.5 if variant == "h2o" else 1.0
    return {
        "memory": "short", "round": number, "traffic": "n", "variant": variant, "tok_per_s": speed,
        "first_token_s": {"p50": first, "p90": first, "p99": first}, "cached_share": 0.5,
        "blocks_peak": 10.0, "tokens_peak": 320.0, "running_mean": 2.0, "preemptions": 0,
    }  # fmt: skip
