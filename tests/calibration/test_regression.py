# SPDX-License-Identifier: Apache-2.0
"""Least squares find the weights, from parts as from the whole, and for all heads as for one."""

import pytest
import torch
from torch import Tensor

from h2o_vllm.calibration.regression import TINY, Sums
from tests.calibration.made import predicted


def examples(heads: int) -> tuple[Tensor, Tensor]:
    """Features, [heads, T, 5], and the attention that 2 heads get by them."""
    source = torch.Generator().manual_seed(0)
    known = torch.randn(heads, 4000, 5, generator=source) * 2 + 7
    truth = torch.tensor([[0.5, -0.2, 0.0, 0.1, 0.3], [-0.1, 0.0, 0.4, 0.2, -0.3]])
    logs = (known @ truth[..., None])[..., 0] - 10
    return known, (logs + torch.randn(logs.shape, generator=source) * 0.01).exp()


@pytest.mark.parametrize("heads", [1, 2])
def test_regression_finds_the_weights(heads: int) -> None:
    known, wanted = examples(heads)
    sums = Sums()
    sums.add(known[:, :1500], wanted[:, :1500])
    sums.add(known[:, 1500:], wanted[:, 1500:])
    assert sums.tokens == 4000
    # A penalty of 10 in 4,000 tokens.
    found = predicted(sums.solve(), known)
    torch.testing.assert_close(found.log(), wanted.log(), rtol=0.02, atol=0.06)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    known, wanted = examples(1)
    known = torch.cat([known, torch.full_like(known[..., :2], 3.0)], -1)
    sums = Sums()
    sums.add(known, wanted)
    torch.testing.assert_close(
        predicted(sums.solve(), known).log(), wanted.log(), rtol=0.02, atol=0.06
    )


def test_no_attention_is_as_little_as_there_can_be() -> None:
    known, wanted = examples(1)
    sums = Sums()
    sums.add(known, torch.zeros_like(wanted))
    least = predicted(sums.solve(), known)
    torch.testing.assert_close(least, torch.full_like(least, TINY), rtol=1e-2, atol=0.0)


def test_what_is_predicted_is_an_attention() -> None:
    weights = torch.tensor([[1e6, 0.0], [-1e6, 0.0]])
    found = predicted(weights, torch.tensor([[[1.0], [-1.0]]]))
    assert (found > 0).all() and (found <= 1).all()


def test_nothing_to_learn_from() -> None:
    with pytest.raises(ValueError, match="no token"):
        Sums().solve()
