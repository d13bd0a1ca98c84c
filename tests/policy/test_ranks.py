# SPDX-License-Identifier: Apache-2.0
"""Centres that are read in parts, and random draws. Each rank, and their sets: ``test_joined_ranks.py``."""

from functools import partial

import torch

from h2o_vllm.policy.formulas import MEASURES, draws
from h2o_vllm.policy.fresh import Centre, Tokens, head_number


def test_a_centre_is_the_same_however_it_is_read() -> None:
    keys, values = torch.randn(2, 2, 6, 3, 16, 8, generator=torch.Generator().manual_seed(1))
    whole, parts = (Centre.begin(2, 3, 8, keys.device) for _ in range(2))
    tokens = Tokens(lambda: (keys, values))
    whole.add(tokens, MEASURES)
    for some in (slice(2), slice(2, 5), slice(5, 6)):
        parts.add(Tokens(partial(lambda some: (keys[:, some], values[:, some]), some)), MEASURES)
    for one in (whole, parts):
        one.complete(6 * 16)
        one.add_distances(one.distances(tokens))
    torch.testing.assert_close(parts.data, whole.data)
    assert torch.isfinite(whole.data).all()


def test_random_draws_are_uniform_and_apart() -> None:
    """Per layer, head and token."""
    found = draws((3, 2, 4000), 5000, 0, "cpu")
    assert found.shape == (3, 2, 4000)
    assert 0 <= found.min() and found.max() < 1
    assert abs(found.mean() - 0.5) < 0.01
    assert abs(found.std() - 12**-0.5) < 0.01
    correlation = torch.corrcoef(found.flatten(0, 1)) - torch.eye(6)
    assert correlation.abs().max() < 0.06


def test_random_draws_anew_at_each_eviction() -> None:
    """Half of a half: what stays is no longer an even sample, and old tokens thin out."""
    found = [draws((1, 1, 4000), 5000 + 32 * at, 0, "cpu")[0, 0] for at in range(3)]
    assert torch.corrcoef(torch.stack(found)).sub(torch.eye(3)).abs().max() < 0.06
    kept = [set(one.topk(2000).indices.tolist()) for one in found]
    assert 900 < len(kept[0] & kept[1]) < 1100


def test_random_draws_agree_across_ranks_and_stages() -> None:
    whole = draws((3, 4, 50), 99, 0, "cpu")
    for layer, head in ((0, 2), (1, 0), (1, 2)):
        mine = draws((2, 2, 50), 99, head_number(layer, head), "cpu")
        assert torch.equal(whole[layer : layer + 2, head : head + 2], mine)
