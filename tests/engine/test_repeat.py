# SPDX-License-Identifier: Apache-2.0
"""Policies that repeat the prompt, on the real scheduler and a tiny real pool: who reads, waits and ends.

Where blocks or seats are short: ``test_repeat_pressure.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from h2o_vllm.blocks import repetition
from h2o_vllm.engine.repeat_text import INSTRUCTION, LATER, RepeatText
from h2o_vllm.errors import ConfigError
from tests.engine.repeat_cases import ASKED, PROMPT, readers, report
from tests.engine.scheduling import Rig

BLOCK = 16
ABORTED = RequestStatus.FINISHED_ABORTED


@pytest.fixture
def rig(model_dir: str) -> Rig:
    return Rig(model_dir, 60, kv_min_tokens=16)


def readers_seen(rig: Rig) -> Iterator[Request]:
    """Step until nothing is left; yields each reader once."""
    known = set()
    for _ in range(2000):
        for reader in readers(rig):
            if reader.request_id not in known:
                known.add(reader.request_id)
                yield reader
        if not rig.scheduler.has_unfinished_requests():
            rig.blocks.check_integrity(idle=True)
            return
        rig.step()
    raise AssertionError("not done")


def instruction(rig: Rig, text: str) -> list[int]:
    from transformers import AutoTokenizer

    model = AutoTokenizer.from_pretrained(rig.config.model_config.tokenizer)
    tokens: list[int] = model.encode(text, add_special_tokens=False)
    return tokens


OPENING = "<|im_end|>\n<|im_start|>assistant\n"


def test_a_reader_reads_the_prompt_an_instruction_and_the_prompt(rig: Rig) -> None:
    rig.add("a", PROMPT, ASKED, max_tokens=40)
    (reader,) = readers_seen(rig)
    asked = instruction(rig, INSTRUCTION) + instruction(rig, OPENING)
    assert reader.prompt_token_ids == [*PROMPT, *asked, *PROMPT]
    shared = len(PROMPT) // BLOCK * BLOCK
    assert report(rig, "a")["tokens_repeated"] == len(reader.prompt_token_ids) - shared
    assert report(rig, "a")["tokens_evicted"] > 0
    assert len(rig.tokens["a"]) == 40


def test_the_instruction_belongs_to_the_users_turn(rig: Rig) -> None:
    """As in the paper, where a chat's prompt ends with the opening of an answer."""
    opening = instruction(rig, OPENING)
    rig.add("a", [*PROMPT, *opening], ASKED, max_tokens=40)
    (reader,) = readers_seen(rig)
    assert reader.prompt_token_ids == [*PROMPT, *instruction(rig, INSTRUCTION), *opening, *PROMPT]


def test_the_first_token_of_prompts_is_not_repeated() -> None:
    text = RepeatText((5,), (6,), (7, 8), start=1)
    assert text.repeated([1, 20, 21, 22]) == range(1, 4)
    assert text.repeated([1, 20, 21, 7, 8]) == range(1, 3)
    assert text.repeated([20, 1, 7, 8]) == range(2)
    # Nothing would be left.
    assert text.repeated([7, 8]) == range(2)
    assert text.repeated([1]) == range(1)


def test_a_default_that_cannot_be_is_refused_at_start_up(model_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-policy repeat: .*--max-num-seqs is 1"):
        Rig(model_dir, 60, max_num_seqs=1, kv_policy="repeat")
    rig = Rig(model_dir, 60, kv_policy="repeat", kv_min_tokens=16)
    rig.add("a", PROMPT, {"kv_budget": 0.2}, max_tokens=40)
    assert len(list(readers_seen(rig))) == 1


def test_a_tokenizer_that_cannot_be_used_ends_nobody_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: object) -> None:
        raise OSError("no such file")

    monkeypatch.setattr("h2o_vllm.engine.repeat_text.cached_tokenizer_from_config", broken)
    rig.add("b", PROMPT, None, max_tokens=20)
    for name in ("a", "c"):
        rig.add(name, PROMPT, ASKED, max_tokens=20)
        assert "tokenizer cannot be used: OSError: no such file" in rig.scheduler._rejected[name]
    rig.run()
    assert [len(rig.tokens[name]) for name in "abc"] == [0, 20, 0]


def test_long_prompts_are_repeated_in_pieces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each behind the prompt alone, and a later one named by what comes before it."""
    monkeypatch.setattr(repetition, "PIECE_TOKENS", 60)
    monkeypatch.setattr(repetition, "LEAST_PIECE", 20)
    rig.add("a", PROMPT, ASKED, max_tokens=40)
    found = [reader.prompt_token_ids for reader in readers_seen(rig)]
    opening = instruction(rig, OPENING)
    first, later = instruction(rig, INSTRUCTION), instruction(rig, LATER)
    assert found == [
        [*PROMPT, *first, *opening, *PROMPT[:60]],
        [*PROMPT, *later, *PROMPT[52:60], *opening, *PROMPT[60:120]],
        [*PROMPT, *later, *PROMPT[112:120], *opening, *PROMPT[120:]],
    ]
    repeated = sum(len(tokens or ()) - 144 for tokens in found)
    assert report(rig, "a")["tokens_repeated"] == repeated


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("delay", [0, 5])
def test_nothing_is_evicted_before_the_last_reader_has_ended(
    model_dir: str, pipelined: bool, delay: int
) -> None:
    """Beside others, and its first tokens do not wait."""
    rig = Rig(model_dir, 80, kv_min_tokens=16, pipelined=pipelined)
    rig.add("b", list(range(5000, 5060)), None, max_tokens=60)
    rig.add("a", PROMPT, ASKED | {"kv_delay": delay}, max_tokens=40)
    while rig.scheduler.has_unfinished_requests():
        rig.step()
        if readers(rig):
            assert not rig.evictions
            assert len(rig.tokens["a"]) <= delay + 1
    assert rig.evictions[0].seen == len(PROMPT) + delay
    assert len(rig.tokens["a"]) == 40
    rig.blocks.check_integrity(idle=True)


def test_readers_are_nobodys_requests(rig: Rig) -> None:
    """Not in outputs, which the rig would not know, nor in the counts of running and waiting requests."""
    rig.add("a", PROMPT, ASKED, max_tokens=40)
    most = 0
    for _ in readers_seen(rig):
        pass
    for stats in rig.stats:
        most = max(most, stats.num_running_reqs + stats.num_waiting_reqs)
        assert stats.num_running_reqs >= 0 and stats.num_waiting_reqs >= 0
    assert most == 1
    assert set(rig.tokens) == {"a"} == set(rig.reports)


def test_law06_readers_publish_nothing_and_read_their_owner_alone(rig: Rig) -> None:
    rig.add("before", PROMPT, None, max_tokens=2)
    rig.run()
    cached = {b.block_id for b in rig.blocks.block_pool.blocks if b.block_hash is not None}
    rig.add("a", PROMPT, ASKED | {"kv_protect": 32}, max_tokens=40)
    for reader in readers_seen(rig):
        table, owners = (rig.blocks.req_to_blocks[name] for name in (reader.request_id, "a"))
        shared = len(PROMPT) // BLOCK
        assert [b.block_id for b in table[:shared]] == [b.block_id for b in owners[:shared]]
        assert len(table) > shared and not {*map(id, table[shared:])} & {*map(id, owners)}
        hashed = {b.block_id for b in table if b.block_hash is not None}
        assert hashed == {b.block_id for b in table[:2]} <= cached
    assert report(rig, "a")["tokens_cached"] == 32


def last_step(model_dir: str) -> int:
    rig = Rig(model_dir, 60, kv_min_tokens=16)
    rig.add("a", PROMPT, ASKED, max_tokens=20)
    return rig.run()


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_law02_an_abort_at_any_time_brings_every_block_home(
    model_dir: str, pipelined: bool
) -> None:
    rig = Rig(model_dir, 60, kv_min_tokens=16, pipelined=pipelined)
    for at in range(last_step(model_dir)):
        rig.add(f"a{at}", PROMPT, ASKED, max_tokens=20)
        for _ in range(at):
            rig.step()
        rig.scheduler.finish_requests(f"a{at}", ABORTED)
        assert not rig.scheduler.requests
        rig.settle()
        rig.run()


def test_a_reader_that_ends_in_any_other_way_keeps_nobody_waiting(rig: Rig) -> None:
    rig.add("a", PROMPT, ASKED, max_tokens=20)
    for reader in readers_seen(rig):
        rig.scheduler.finish_requests(reader.request_id, RequestStatus.FINISHED_ERROR)
    assert len(rig.tokens["a"]) == 20


def test_ending_everything_ends_readers_too(rig: Rig) -> None:
    rig.add("a", PROMPT, ASKED, max_tokens=20)
    for _ in readers_seen(rig):
        rig.scheduler.finish_requests(None, ABORTED)
        assert not rig.scheduler.requests
    assert "a" not in rig.blocks.req_to_blocks


def test_who_cannot_evict_is_not_repeated(rig: Rig) -> None:
    rig.add("short", PROMPT[:14], ASKED, max_tokens=2)
    rig.add("whole", PROMPT, ASKED | {"kv_budget": 1.0}, max_tokens=20)
    rig.add("protected", PROMPT, ASKED | {"kv_protect": "prompt"}, max_tokens=60)
    assert not list(readers_seen(rig))
    assert report(rig, "protected")["tokens_repeated"] == 0
    assert report(rig, "protected")["tokens_evicted"] > 0


@pytest.mark.parametrize(
    ("length", "blocks", "seats", "words"),
    [
        (4000, 600, 16, "model's length of 4096 tokens"),
        (150, 19, 16, "288 tokens of KV"),
        (150, 60, 1, "--max-num-seqs is 1"),
    ],
)
def test_what_cannot_be_repeated_is_refused_with_the_numbers(
    model_dir: str,
    length: int,
    blocks: int,
    seats: int,
    words: str,
) -> None:
    rig = Rig(model_dir, blocks, kv_min_tokens=16, max_num_seqs=seats)
    reasons: dict[str, str] = rig.scheduler._rejected
    rig.add("a", list(range(length)), ASKED, max_tokens=20)
    assert words in reasons["a"] and reasons["a"].startswith("kv_policy must be another one")
    rig.run()
    assert not rig.evictions and not rig.tokens["a"]


@pytest.mark.parametrize(
    "odd",
    [
        {"kv_sinks": 1024},
        {"kv_delay": 256},
        {"kv_evict_from": 151},
        {"kv_evict_from": 10_000},
        {"kv_budget_tokens": 1, "kv_budget": None},
        {"kv_recent": 0.0},
        {"kv_recent": 1.0},
        {"kv_protect": 149},
    ],
)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 150, 160])
def test_law08_odd_values_are_served(rig: Rig, odd: dict[str, Any], length: int) -> None:
    asked = {key: value for key, value in (ASKED | odd).items() if value is not None}
    rig.add("a", PROMPT[:length] + list(range(150, length)), asked, max_tokens=60)
    rig.run()
    assert len(rig.tokens["a"]) == 60
