# SPDX-License-Identifier: Apache-2.0
"""Evictions of the CPU benchmark: gate, rows and lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from h2o_vllm.kernels import cpu as kernels
from loadtest.kernels.evictions import EVICTIONS, EvictionCase

CALLS = ("predict", "key_similarity", "value_distances", "merge_ranks", "compact")
SMALL = [EvictionCase(call, "SmolLM2-135M", 8, 1, torch.float32) for call in CALLS]


def test_small_ones_are_among_those_that_are_timed() -> None:
    assert {(one.call, one.shape, one.blocks, one.doomed) for one in SMALL} <= {
        (one.call, one.shape, one.blocks, one.doomed) for one in EVICTIONS
    }


@pytest.mark.parametrize("case", SMALL, ids=CALLS)
def test_gate_lets_ours_through_and_names_who_is_wrong(case: EvictionCase) -> None:
    ours = {"reference": kernels.load("reference"), "cpp": kernels.load("cpp")}
    assert case.wrong(ours) is None
    idle = SimpleNamespace(
        compact=lambda *args: None,  # moves nothing, so that scores stay as they were
        **{name: lambda *args, **kwargs: torch.zeros(30, 3, 256) for name in CALLS[:4]},
    )
    assert case.wrong(ours | {"idle": idle}) == "idle"


def test_bytes_moved_are_the_least() -> None:
    tokens = 30 * 3 * 8 * 32
    assert [one.moved_bytes for one in SMALL] == [
        tokens * (2 * 64 * 4 + 4),
        tokens * (64 * 4 + 4),
        tokens * (64 * 4 + 4),
        tokens * 4 * 4,
        # Of the doomed eighth seven eighths survive: key, value and score, read and written.
        tokens * 4 + tokens * 7 // 64 * (4 * 64 * 4 + 8),
    ]
