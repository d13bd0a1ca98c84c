# SPDX-License-Identifier: Apache-2.0
"""What is particular to each rank. All of them, and their sets: ``test_joined_ranks.py``."""

from dataclasses import replace

import torch

from h2o_vllm.policy.candidates import Candidates, head_number
from tests.policy.cases import candidates_of, measures_of, scored


def test_attention_is_h2os_sum_as_published() -> None:
    """Never adjusted."""
    given = candidates_of(torch.rand(1, 1, 20), 8, 50, 100)
    assert scored("h2o", given) is given.scores


def test_mean_ranks_by_the_mean() -> None:
    scores = torch.rand(1, 1, 20)
    new = scored("mean", candidates_of(scores, 8, 50, 100))
    means = scores[..., 8:] / (100 - torch.arange(50, 62))
    torch.testing.assert_close(new[..., 8:], means * 100)


def test_value_weighs_the_mean_by_what_the_value_adds() -> None:
    scores, values = torch.rand(1, 1, 20), torch.zeros(1, 1, 20, 8)
    # Of all 20 candidates two values differ, one of a survivor and, three times as far, one of a newcomer.
    values[..., 3, 0], values[..., 13, 1] = 20.0, 60.0
    given = Candidates(scores, 8, 50, 100, *measures_of(values, values))
    distances = (values[0, 0] - torch.tensor([1.0, 3.0, *[0.0] * 6])).norm(dim=1)
    want = (scored("mean", given)[0, 0] * distances / distances.mean())[8:]
    torch.testing.assert_close(scored("value", given)[0, 0, 8:], want)


def test_end_pools_the_fresh_tokens_once() -> None:
    scores = torch.zeros(1, 1, 30)
    scores[..., 2], scores[..., 10], scores[..., 20] = 9.0, 5.0, 7.0
    new = scored("end", replace(candidates_of(scores, 8, 50, 100), late=scores))
    assert new[0, 0, :8].tolist() == [0, 0, 9, 0, 0, 0, 0, 0]
    assert new[0, 0, 8:14].tolist() == [5.0] * 6
    assert new[0, 0, 17:24].tolist() == [7.0] * 7
    assert new.count_nonzero() == 1 + 6 + 7


def test_key_keeps_the_odd_key_out() -> None:
    keys = torch.ones(1, 1, 20, 8) + torch.randn(1, 1, 20, 8) * 0.1
    keys[..., 13, :] *= -100
    new = scored("key", Candidates(torch.zeros(1, 1, 20), 0, 0, 20, *measures_of(keys, keys)))
    assert int(new.argmax()) == 13
    assert -1.0001 <= new.min() and new.max() <= 1.0001


def test_of_equal_predictions_the_newest_comes_first() -> None:
    given = candidates_of(torch.rand(1, 1, 40), 8, 50, 100)
    assert given.predicted is not None
    want = given.predicted() * (torch.arange(50, 82) * 2.0**-17).exp()
    torch.testing.assert_close(scored("predicted", given)[..., 8:], want)


def test_attentions_sinks_are_never_predicted_less_than_others() -> None:
    scores = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(3))
    for fresh_from, sinks in ((0, 4), (2, 2), (32, 0)):
        new = scored("predicted", candidates_of(scores, 0, fresh_from, 100))
        first = new.argsort(dim=-1, descending=True)[..., :sinks].sort(dim=-1).values
        assert (first == torch.arange(sinks)).all()
        assert (new > 1).sum() == 6 * sinks


def test_random_draws_are_uniform_and_of_the_request_alone() -> None:
    """Per layer and head, for known and fresh tokens alike, whatever their scores."""
    scores = torch.rand(3, 2, 4000)
    draws = scored("random", candidates_of(scores, 16, 100, 5000))
    assert draws.shape == (3, 2, 4000)
    assert 0 <= draws.min() and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(draws.std() - 12**-0.5) < 0.01
    correlation = torch.corrcoef(draws.flatten(0, 1)) - torch.eye(6)
    assert correlation.abs().max() < 0.06
    again = scored("random", candidates_of(torch.zeros(3, 2, 4000), 0, 0, 5000, seed=1))
    assert torch.equal(draws, again)


def test_random_draws_anew_at_each_eviction() -> None:
    """Half of a half: what stays is no longer an even sample, and old tokens thin out."""
    given = candidates_of(torch.zeros(1, 1, 4000), 0, 0, 5000)
    draws = [scored("random", replace(given, seen=5000 + 32 * at))[0, 0] for at in range(3)]
    assert torch.corrcoef(torch.stack(draws)).sub(torch.eye(3)).abs().max() < 0.06
    kept = [set(one.topk(2000).indices.tolist()) for one in draws]
    assert 900 < len(kept[0] & kept[1]) < 1100


def test_random_draws_agree_across_ranks_and_stages() -> None:
    whole = scored("random", candidates_of(torch.zeros(3, 4, 50), 0, 0, 99))
    second = candidates_of(torch.zeros(2, 2, 50), 0, 0, 99)
    for layer, head in ((0, 2), (1, 0), (1, 2)):
        mine = scored("random", replace(second, first_head=head_number(layer, head)))
        assert torch.equal(whole[layer : layer + 2, head : head + 2], mine)
