# SPDX-License-Identifier: Apache-2.0
"""Evictions of the CPU benchmark: gate, rows and lines."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from h2o_vllm.kernels import cpu as kernels
from loadtest.kernels.evictions import EVICTIONS, EvictionCase

SMALL = EvictionCase("SmolLM2-135M", 8, 1, torch.float32)


def test_a_small_one_is_among_those_that_are_timed() -> None:
    timed = {(one.shape, one.blocks, one.doomed) for one in EVICTIONS}
    assert (SMALL.shape, SMALL.blocks, SMALL.doomed) in timed


def test_gate_lets_ours_through_and_names_who_is_wrong() -> None:
    ours = {"reference": kernels.load("reference"), "cpp": kernels.load("cpp")}
    assert SMALL.wrong(ours) is None
    # Moves nothing, so that scores stay as they were.
    idle = SimpleNamespace(compact=lambda *args: None)
    assert SMALL.wrong(ours | {"idle": idle}) == "idle"


def test_bytes_moved_are_the_least() -> None:
    tokens = 30 * 3 * 8 * 32
    # Of the doomed eighth seven eighths survive: key, value and score, read and written.
    assert SMALL.moved_bytes == tokens * 4 + tokens * 7 // 64 * (4 * 64 * 4 + 8)
