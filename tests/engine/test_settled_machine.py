# SPDX-License-Identifier: Apache-2.0
"""Laws 1 to 3 and 5 to 7 of chats whose segments settle, in any order of events, on ghost memory."""

import random

import pytest

from tests.engine.traffic_chats import Chats
from tests.engine.traffic_fields import run_machine


def test_chats_in_any_order_keep_the_laws(
    model_dir: str, long: bool, pytestconfig: pytest.Config
) -> None:
    Chats.model_dir = model_dir
    run_machine(Chats, 3000 if long else 25, pytestconfig, derandomize=not long)
    print(
        f"{Chats.turns} turns, {Chats.settled} segments settled, {Chats.found} found, "
        f"{Chats.resumed} resumed behind one, {Chats.shared} times two held one, {Chats.held} steps with "
        f"held blocks, {Chats.shortages} shortages"
    )
    # What is drawn changes with the code that is loaded; the next test counts what is found.
    assert Chats.turns > 50
    assert Chats.settled > 10


def test_chats_find_what_has_settled(model_dir: str) -> None:
    """Each step is checked as above; here many turns read segments, and several requests hold one."""
    Chats.model_dir = model_dir
    asked = {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": 128, "kv_protect": 0}
    found, resumed, shared, held = Chats.found, Chats.resumed, Chats.shared, Chats.held
    for seed in range(2):
        chance, chats = random.Random(seed), Chats()
        chats.start(
            num_blocks=40, caching=True, pipelined=False, stages=1, drafts=0, ahead=False, exact=False,
            policy="fcfs", batched_tokens=64, watermark=0.0, beside=(), retention=0,
            kv_elastic_admission="squeeze", kv_turn_seconds=1e-9,
        )  # fmt: skip
        for _ in range(12):
            if chance.random() < 0.6:
                cut = chance.choice([1.0, chance.uniform(0.4, 1.0)])
                more, answer = chance.randint(1, 60), chance.randint(1, 60)
                chats.next_turn(
                    chance.randrange(6), cut, more, asked, answer, chance.randint(0, 30)
                )
            else:
                readers = [chance.randint(1, 50) for _ in range(3)]
                chats.same_document(chance.randint(170, 240), readers, asked, chance.randint(0, 8))
    assert Chats.found - found > 10
    assert Chats.resumed - resumed > 5
    assert Chats.shared - shared > 10
    assert Chats.held - held > 10
