# SPDX-License-Identifier: Apache-2.0
"""Block tables lose their holes, and new slots get their first score, as in the reference."""

import pytest
import torch

from h2o_vllm.kernels import reference
from h2o_vllm.kernels.triton import EVICTING, SCORED, reset_scores, tables
from tests.kernels.triton.cases import bits
from tests.kernels.triton.table_laws import check_tables

pytestmark = pytest.mark.table


@pytest.mark.parametrize("width", [8, 512])
def test_tables_lose_their_holes(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_WIDTH", width)
    table = torch.randint(1, 99, (8, 40), dtype=torch.int32)
    table[0, 3:9] = 0
    table[1, 3:9] = 0  # not an evicting row: its zeros stay
    table[2, 0] = 0
    table[2, 30:] = 0
    table[3, 1:38] = 0
    table[7] = 0  # of no request
    lens = torch.tensor([160, 161, 480, 637, 33, 0, 640, 75], dtype=torch.int32)
    both = EVICTING | SCORED
    flags = torch.tensor([both, 0, EVICTING, both, SCORED, both, both, EVICTING], dtype=torch.int32)
    check_tables(table, lens, flags, 16)


def test_tables_may_be_strided_and_buffers_larger() -> None:
    table = torch.randint(0, 9, (5, 64), dtype=torch.int32)[:, :24]
    lens = torch.tensor([300, 1, 64, 65, 0], dtype=torch.int32)
    check_tables(table, lens, torch.full((5,), 3, dtype=torch.int32), 16, extra_rows=3)


@pytest.mark.parametrize("count", [0, 4, 300])
def test_reset_equals_the_reference(count: int) -> None:
    gen = torch.Generator().manual_seed(count)
    scores = torch.rand(3, 12, 2, 32, generator=gen)
    slots = torch.randperm(12 * 32, generator=gen)[:count]
    slots[::3] = -1
    want = scores.clone()
    reset_scores(scores, slots)
    reference.reset_scores(want, slots)
    assert torch.equal(bits(scores), bits(want))
