# SPDX-License-Identifier: Apache-2.0
"""The decode kernel is launched as a way of cutting says, and after it as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from h2o_vllm.kernels.triton import decode, workspace
from loadtest.kernels.tiles import CUTS, Cut, way


class Kernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **sizes: (grid, given, sizes)


def test_options_replace_what_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_attend", Kernel())
    shipped = workspace._PROGRAMS_PER_PROCESSOR
    with way(Cut(32, 2, None, 9)):
        launched = decode._attend[(5,)]("q", num_warps=4, num_stages=5)
        assert launched == ((5,), ("q",), {"num_warps": 2, "num_stages": 5})
        assert workspace._PROGRAMS_PER_PROCESSOR == 9
        assert (
            workspace._tile_of(128, torch.bfloat16) == 32 == workspace._tile_of(64, torch.bfloat16)
        )
    assert isinstance(decode._attend, Kernel)
    with way(Cut()):
        assert decode._attend[(5,)](num_warps=4) == ((5,), (), {"num_warps": 4})
        assert workspace._PROGRAMS_PER_PROCESSOR == shipped
        assert workspace._tile_of(64, torch.bfloat16) == 64


def test_no_way_is_tried_twice() -> None:
    assert len(set(CUTS)) == len(CUTS) and CUTS[0] == Cut()
