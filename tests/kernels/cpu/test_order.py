# SPDX-License-Identifier: Apache-2.0
"""Scores in order, as torch sorts them."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from h2o_vllm.policy.formulas import order


def scores_of(shape: tuple[int, ...], values: int) -> Tensor:
    """Of many sizes and both signs, or so few ``values`` that most tie, zeros of both signs among them."""
    gen = torch.Generator().manual_seed(5)
    if values:
        scores = torch.randint(-values, values, shape, generator=gen) / 8
        scores[..., ::5] = -0.0
        return scores
    return torch.randn(shape, generator=gen) * torch.randint(-40, 40, shape, generator=gen).exp2()


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("values", [0, 3])
@pytest.mark.parametrize("count", [0, 1, 64, 65, 3000])
def test_it_is_torchs_stable_one(impl: ModuleType, threads: int, count: int, values: int) -> None:
    scores = scores_of((3, 2, count), values)
    assert torch.equal(impl.order(scores), order(scores))


@pytest.mark.parametrize("count", [40, 300])
def test_infinities_nan_and_views_of_others(impl: ModuleType, count: int) -> None:
    whole = scores_of((4, count + 7), 0)
    scores = whole[..., 7:]
    scores[0, 3], scores[1, 2], scores[2, 1:5] = float("inf"), float("-inf"), float("nan")
    scores[3, 9] = -float("nan")
    before = whole.clone()
    assert torch.equal(impl.order(scores), order(scores))
    assert torch.equal(whole.nan_to_num(7.0), before.nan_to_num(7.0))
