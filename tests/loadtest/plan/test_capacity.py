# SPDX-License-Identifier: Apache-2.0
"""How many requests of hybrid models fit: what the real scheduler says is what counting by hand says."""

from __future__ import annotations

import math

import pytest

from loadtest.plan.capacity import main, measure
from loadtest.plan.hybrids import HYBRIDS

LENGTHS = (7936, 256)


def test_blocks_are_as_large_as_a_state() -> None:
    shape = HYBRIDS["qwen3.5-27b"]
    assert 16 * shape.token_bytes == 65_536
    assert shape.state_bytes == 3_207_168
    # What vLLM logs for this model on GPUs.
    assert shape.block_size(16) == 784
    assert shape.block_size(32) == 800
    small = HYBRIDS["lfm2-1.2b"]
    assert 6 * small.token_bytes == 12_288
    assert small.block_size(16) == 16


@pytest.mark.parametrize("name", HYBRIDS)
def test_full_kv_fits_as_often_as_its_blocks_and_states_do(name: str) -> None:
    shape, memory = HYBRIDS[name], 4 << 30
    found = measure(shape, 1.0, LENGTHS, memory, 32)
    # States lie in groups of as many layers as have attention.
    layers = min(shape.attention, shape.states)
    assert found.groups == 1 + math.ceil(shape.states / layers)
    assert found.blocks == memory // (layers * found.block_size * shape.token_bytes)
    # Those of earlier chunks are free again, for the prefix cache.
    assert found.states == found.groups - 1
    whole = math.ceil(sum(LENGTHS) / found.block_size)
    prompt = math.ceil(LENGTHS[0] / found.block_size)
    assert prompt <= found.attention <= whole
    most, least = ((found.blocks - 1) // (one + found.states) for one in (prompt, whole))
    assert least <= found.requests <= most


def test_a_budget_makes_room_for_more_requests_but_not_for_fewer_states() -> None:
    shape, memory = HYBRIDS["qwen3.5-27b"], 4 << 30
    full, fifth = (measure(shape, share, LENGTHS, memory, 32) for share in (1.0, 0.2))
    assert fifth.states == full.states
    # A block more than the budget's 1,639 tokens take, at most.
    assert fifth.attention in (3, 4)
    # Scores take a hundredth.
    assert 0.98 * full.blocks < fifth.blocks <= full.blocks
    # The newest request still holds its whole prompt.
    most = 1 + (fifth.blocks - 1 - 13) // (fifth.attention + 3)
    assert fifth.requests in (most - 1, most)
    assert fifth.requests >= 2 * full.requests


def test_what_cannot_be_told_is_an_error() -> None:
    shape = HYBRIDS["lfm2-1.2b"]
    with pytest.raises(ValueError, match="does not fit"):
        measure(shape, 1.0, LENGTHS, 64 << 20, 32)
    with pytest.raises(ValueError, match="end before the pool is full"):
        measure(shape, 0.2, (1000, 8), 1 << 30, 32)


def test_the_command_prints_a_line_per_budget(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "lfm2-1.2b", "--gib", "0.5", "--traffic", "4000+200", "--budgets", "1", "0.5"])
    full, half = capsys.readouterr().out.splitlines()[-2:]
    assert full.startswith("| lfm2-1.2b | 1 | 32 |")
    assert float(half.split("|")[6]) > 1.3
