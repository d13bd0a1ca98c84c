# SPDX-License-Identifier: Apache-2.0
"""Joined ranks are those of the policies, whatever ties there are."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from h2o_vllm.policy.formulas import merge_ranks


def ranks_of(ways: int, shape: tuple[int, ...], values: int = 0) -> list[Tensor]:
    """Of many sizes and both signs, or so few ``values`` that most tie, zeros of both signs among them."""
    gen = torch.Generator().manual_seed(5)
    ranks = []
    for _ in range(ways):
        if values:
            ranks.append(torch.randint(-values, values, shape, generator=gen) / 8 * 1.0)
            ranks[-1][..., ::5] = -0.0
        else:
            sizes = torch.randint(-40, 40, shape, generator=gen).float().exp2()
            ranks.append(torch.randn(shape, generator=gen) * sizes)
    return ranks


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("values", [0, 3])
@pytest.mark.parametrize("count", [1, 64, 65, 3000])
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_it_is_what_the_policies_say(
    impl: ModuleType, threads: int, ways: int, count: int, values: int
) -> None:
    ranks = ranks_of(ways, (3, 2, count), values)
    got, want = impl.merge_ranks(*ranks), merge_ranks(*ranks)
    # But for the signs of zeros, which torch's maximum takes from one side or the other.
    assert torch.equal(got, want)
    assert ways == 1 or count == 1 or not torch.equal(got, ranks[0])


def test_infinities_and_views_of_others(impl: ModuleType) -> None:
    ranks = [rank[..., 7:] for rank in ranks_of(3, (4, 300))]
    ranks[0][0, 3], ranks[1][1, 2], ranks[2][2, 1] = float("inf"), float("inf"), float("-inf")
    before = [rank.clone() for rank in ranks]
    got = impl.merge_ranks(*ranks)
    assert torch.equal(got, merge_ranks(*ranks))
    assert all(torch.equal(one, other) for one, other in zip(ranks, before, strict=True))


def test_no_tokens(impl: ModuleType) -> None:
    assert impl.merge_ranks(*ranks_of(2, (3, 0))).shape == (3, 0)
