# SPDX-License-Identifier: Apache-2.0
"""What is particular to each rank. All of them, and their sets: ``test_joined_ranks.py``."""

from dataclasses import replace
from functools import partial

import torch

from h2o_vllm.policy.formulas import MEASURES, draws
from h2o_vllm.policy.fresh import Centre, Tokens, head_number
from tests.policy.cases import centre_of, fresh_of, measures_of, scored


def test_attention_is_h2os_sum_as_published() -> None:
    scores = torch.rand(1, 1, 20)
    assert torch.equal(scored("h2o", fresh_of(scores, 50, 100)), scores)


def test_mean_ranks_by_the_mean() -> None:
    scores = torch.rand(1, 1, 12)
    means = scores / (100 - torch.arange(50, 62))
    torch.testing.assert_close(scored("mean", fresh_of(scores, 50, 100)), means * 100)


def test_value_weighs_the_mean_by_what_the_value_adds() -> None:
    values = torch.zeros(1, 1, 20, 8)
    # Two of 20 values differ, one of them three times as far.
    values[..., 3, 0], values[..., 13, 1] = 20.0, 60.0
    given = replace(fresh_of(torch.rand(1, 1, 20), 50, 100), measures=measures_of(values, values))
    distances = (values[0, 0] - torch.tensor([1.0, 3.0, *[0.0] * 6])).norm(dim=1)
    want = scored("mean", given)[0, 0] * distances / distances.mean()
    torch.testing.assert_close(scored("value", given)[0, 0], want)


def test_end_pools_the_tokens() -> None:
    late = torch.zeros(1, 1, 1, 22)
    late[..., 2], late[..., 12] = 5.0, 7.0
    new = scored("end", replace(fresh_of(torch.rand(1, 1, 22), 50, 100), late=late))
    assert new[0, 0, :6].tolist() == [5.0] * 6
    assert new[0, 0, 9:16].tolist() == [7.0] * 7
    assert new.count_nonzero() == 6 + 7


def test_key_keeps_the_odd_key_out() -> None:
    keys = torch.ones(1, 1, 20, 8) + torch.randn(1, 1, 20, 8) * 0.1
    keys[..., 13, :] *= -100
    given = replace(fresh_of(torch.zeros(1, 1, 20), 0, 20), measures=measures_of(keys, keys))
    new = scored("key", given)
    assert int(new.argmax()) == 13
    assert -1.0001 <= new.min() and new.max() <= 1.0001


def test_later_tokens_are_compared_with_the_first_ones() -> None:
    """One token's scores do not depend on those that are ranked with it."""
    gen = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 2, 3, 40, 8, generator=gen)
    centre = centre_of(keys[:, :, :32], values[:, :, :32])
    later = measures_of(keys[:, :, 32:], values[:, :, 32:], centre)
    one = measures_of(keys[:, :, 35:36], values[:, :, 35:36], centre)
    directions = torch.nn.functional.normalize(keys, dim=-1)
    mean = torch.nn.functional.normalize(directions[:, :, :32].mean(2, keepdim=True), dim=-1)
    want = (directions * mean).sum(-1)[:, :, 32:]
    torch.testing.assert_close(later["similarity"][:, 0], want)
    for name, found in later.items():
        assert torch.equal(found[..., 3:4], one[name])


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


def test_of_equal_predictions_the_newest_comes_first() -> None:
    given = fresh_of(torch.rand(1, 1, 32), 50, 100)
    want = given.measures["predicted"][:, 0] * (torch.arange(50, 82) * 2.0**-17).exp()
    torch.testing.assert_close(scored("predicted", given), want)


def test_attentions_sinks_are_never_predicted_less_than_others() -> None:
    scores = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(3))
    for fresh_from, sinks in ((0, 4), (2, 2), (32, 0)):
        new = scored("predicted", fresh_of(scores, fresh_from, 100))
        first = new.argsort(dim=-1, descending=True)[..., :sinks].sort(dim=-1).values
        assert (first == torch.arange(sinks)).all()
        assert (new > 1).sum() == 6 * sinks


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
