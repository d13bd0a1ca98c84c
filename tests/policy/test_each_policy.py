# SPDX-License-Identifier: Apache-2.0
"""What is particular to each policy: how it ranks, and what it frees first."""

from dataclasses import replace

import pytest
import torch

from h2o_vllm.config.policies import ZAP_POLICIES
from h2o_vllm.policy import Candidates, get_policy
from tests.policy.cases import candidates_of, measures_of


def test_h2o_is_as_published() -> None:
    """All queries, summed, never adjusted."""
    policy = get_policy("h2o")
    assert policy.scores_attention and not policy.scores_at_eviction and not policy.last_query_only
    assert policy.scored_prompt_queries is None
    assert policy.initial_scores(torch.arange(4), 1, 1, 0) is None


def test_h2o_norm_ranks_by_the_mean() -> None:
    scores = torch.rand(1, 1, 20)
    new = get_policy("h2o-norm").eviction_scores(candidates_of(scores, 8, 50, 100))
    assert new is not None
    assert torch.equal(new[..., :8], scores[..., :8])
    means = scores[..., 8:] / (100 - torch.arange(50, 62))
    torch.testing.assert_close(new[..., 8:], means * 100)


def test_caote_weighs_the_mean_by_what_the_value_adds() -> None:
    scores, values = torch.rand(1, 1, 20), torch.zeros(1, 1, 20, 8)
    # Of all 20 candidates two values differ, one of a survivor and, three times as far, one of a newcomer.
    values[..., 3, 0], values[..., 13, 1] = 20.0, 60.0
    given = Candidates(scores, 8, 50, 100, *measures_of(values, values))
    new, means = (
        get_policy("caote").eviction_scores(given),
        get_policy("h2o-norm").eviction_scores(given),
    )
    assert new is not None and means is not None
    assert torch.equal(new[..., :8], scores[..., :8]), "survivors have been weighed before"
    distances = (values[0, 0] - torch.tensor([1.0, 3.0, *[0.0] * 6])).norm(dim=1)
    torch.testing.assert_close(new[0, 0, 8:], (means[0, 0] * distances / distances.mean())[8:])


def test_snapkv_pools_the_fresh_tokens_once() -> None:
    scores = torch.zeros(1, 1, 30)
    scores[..., 2], scores[..., 10], scores[..., 20] = 9.0, 5.0, 7.0
    new = get_policy("snapkv").eviction_scores(candidates_of(scores, 8, 50, 100))
    assert new is not None
    assert new[0, 0, :8].tolist() == [0, 0, 9, 0, 0, 0, 0, 0]
    assert new[0, 0, 8:14].tolist() == pytest.approx([5.0] * 6, rel=3e-5)
    assert new[0, 0, 17:24].tolist() == pytest.approx([7.0] * 7, rel=3e-5)
    assert new.count_nonzero() == 1 + 6 + 7


@pytest.mark.parametrize("at", [13, 29])
def test_snapkv_parts_those_around_a_hit(at: int) -> None:
    """Itself, then who comes behind it, before it, ...; at the end of the fresh ones as in their midst."""
    scores = torch.full((1, 1, 30), 1e-9)
    scores[..., at] = 5.0
    new = get_policy("snapkv").eviction_scores(candidates_of(scores, 8, 50, 100))
    assert new is not None
    best = new[0, 0].argsort(descending=True, stable=True).tolist()
    expected = [at, at + 1, at - 1, at + 2, at - 2, at + 3, at - 3]
    expected = [one for one in expected if one < 30]
    assert best[: len(expected)] == expected
    assert len(new[0, 0, best[: len(expected)]].unique()) == len(expected)


def test_keydiff_keeps_the_odd_key_out() -> None:
    keys = torch.ones(1, 1, 20, 8) + torch.randn(1, 1, 20, 8) * 0.1
    keys[..., 13, :] *= -100
    given = Candidates(torch.zeros(1, 1, 20), 0, 0, 20, *measures_of(keys, keys))
    new = get_policy("keydiff").eviction_scores(given)
    assert new is not None
    assert int(new.argmax()) == 13
    assert -1.0001 <= new.min() and new.max() <= 1.0001


@pytest.mark.parametrize(
    "ways",
    ["caote-keydiff", "snapkv-keydiff", "caote-snapkv-keydiff", "zap-caote-snapkv-keydiff"],
)
def test_mixes_take_the_best_rank_and_keep_attentions_units(ways: str) -> None:
    scores = torch.rand(1, 1, 40, generator=torch.Generator().manual_seed(2))
    given = candidates_of(scores, 8, 50, 100)
    assert given.late is not None
    planes = [replace(given, scores=given.late) if at else given for at in range(2)]
    first, *others = (
        get_policy(way).eviction_scores(planes[at > 0 and way == "snapkv"])
        for at, way in enumerate(ways.split("-"))
    )
    mixed = get_policy(ways).eviction_scores(given)
    assert mixed is not None
    assert torch.equal(mixed[..., :8], scores[..., :8]), "survivors have been ranked before"
    used, best, *ranked = (one[0, 0, 8:].tolist() for one in (first, mixed, *others))
    ordered = sorted(used, reverse=True)
    for place, score in enumerate(best):
        found = [
            ordered[sum(x > way[place] for x in way)] * (1 - behind * 2.0**-20)
            for behind, way in enumerate((used, *ranked))
        ]
        assert score == pytest.approx(max(found), rel=1e-7)
    assert len(set(best)) == len(best), "tokens of one rank tie"
    order = sorted(range(len(best)), key=lambda place: -best[place])
    ranks = [[sum(x > one for x in way) for one in way] for way in (used, *ranked)]
    assert order == sorted(order, key=lambda place: min((r[place], w) for w, r in enumerate(ranks)))


def test_tokens_of_one_rank_stay_apart_in_sums() -> None:
    """As long as all get the same, in float32."""
    keys = torch.randn(1, 1, 64, 8, generator=torch.Generator().manual_seed(3))
    scores = torch.linspace(30.0, 31.0, 64)[None, None].clone()
    given = Candidates(scores, 0, 0, 200, *measures_of(keys, keys))
    mixed = get_policy("snapkv-keydiff").eviction_scores(given)
    assert mixed is not None
    for _ in range(100):
        mixed = mixed + torch.tensor(1e-3)
    assert len(mixed[0, 0].unique()) == 64


def test_what_is_foretold_is_asked_once() -> None:
    """When a token is ranked first; alone, or by the best of its rank and that of its distinction."""
    scores = torch.rand(1, 1, 40, generator=torch.Generator().manual_seed(3))
    given = candidates_of(scores, 8, 50, 100)
    assert given.foretold is not None
    # Of equals the newest comes first.
    foretold = given.foretold() * (torch.arange(50, 82) * 2.0**-17).exp()
    alone, mixed, three = (get_policy(name).eviction_scores(given) for name in ZAP_POLICIES[:3])
    assert alone is not None and mixed is not None
    torch.testing.assert_close(alone, torch.cat([scores[..., :8], foretold], -1))
    distinct = (-given.key_likeness())[0, 0, 8:].argsort(descending=True, stable=True)
    second = foretold[0, 0].sort(descending=True).values * (1 - 2.0**-20)
    best = torch.maximum(foretold[0, 0], torch.empty(32).scatter_(0, distinct, second))
    torch.testing.assert_close(mixed[0, 0, 8:], best)
    looks = get_policy("snapkv").eviction_scores(given)
    assert looks is not None and three is not None
    order = looks[0, 0, 8:].argsort(descending=True, stable=True)
    ordered = foretold[0, 0].sort(descending=True).values * (1 - 2.0**-20)
    raised = torch.empty(32).scatter_(0, order, ordered)
    keys = (-given.key_likeness())[0, 0, 8:].argsort(descending=True, stable=True)
    third = foretold[0, 0].sort(descending=True).values * (1 - 2.0**-19)
    raised = torch.maximum(raised, torch.empty(32).scatter_(0, keys, third))
    torch.testing.assert_close(three[0, 0, 8:], torch.maximum(raised, foretold[0, 0]))
    assert torch.equal(three[..., :8], scores[..., :8])
    for name in ZAP_POLICIES[:3]:
        assert get_policy(name).eviction_scores(replace(given, known=40)) is None
    assert torch.equal(
        get_policy(ZAP_POLICIES[3]).eviction_scores(replace(given, known=40)), scores
    )


def test_attentions_sinks_are_never_foretold_less_than_others() -> None:
    scores = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(3))
    for fresh_from, sinks in ((0, 4), (2, 2), (32, 0)):
        given = candidates_of(scores, 0, fresh_from, 100)
        new = get_policy("zap").eviction_scores(given)
        assert new is not None
        first = new.argsort(dim=-1, descending=True)[..., :sinks].sort(dim=-1).values
        assert (first == torch.arange(sinks)).all()
        assert (new > 1).sum() == 6 * sinks


def test_inside_of_a_prompt_what_is_foretold_has_no_looks_beside_it() -> None:
    given = replace(candidates_of(torch.rand(1, 2, 40), 8, 50, 100), in_prompt=True)
    two, three = get_policy("zap-keydiff"), get_policy("zap-snapkv-keydiff")
    assert torch.equal(three.eviction_scores(given), two.eviction_scores(given))
    behind = replace(given, in_prompt=False)
    assert not torch.equal(three.eviction_scores(behind), two.eviction_scores(behind))


def test_inside_of_a_prompt_nothing_is_known_of_its_end() -> None:
    given = candidates_of(torch.rand(1, 2, 40), 8, 50, 100)
    inside = replace(given, late=None)
    two, three = get_policy("caote-keydiff"), get_policy("caote-snapkv-keydiff")
    assert torch.equal(three.eviction_scores(inside), two.eviction_scores(given))
    assert not torch.equal(three.eviction_scores(given), two.eviction_scores(given))


def test_h2o_frees_the_published_prompt_first_and_the_youngest_block_later() -> None:
    policy = get_policy("h2o")
    assert policy.split([0, 1, 2, 3, 4], 3, first=True).doomed == (0, 1, 2)
    assert policy.split([3, 4, 9], 1, first=False).doomed == (9,)


def test_window_keeps_the_first_block_while_it_can() -> None:
    policy = get_policy("window")
    assert policy.split([0, 1, 2, 3], 2, first=True).doomed == (1, 2)
    assert policy.split([0, 7], 1, first=False).doomed == (7,)
    assert policy.split([0, 7], 2, first=False).doomed == (0, 7)
    assert policy.split([0, 1, 2, 3], 2, first=True, protected=2).doomed == (2, 3)


def test_random_ranks_are_uniform_repeatable_and_independent_of_the_batch() -> None:
    policy = get_policy("random")
    ranks = policy.initial_scores(torch.arange(4000), 3, 2, 0)
    assert ranks is not None
    assert ranks.shape == (3, 2, 4000)
    assert 0 <= ranks.min() and ranks.max() < 1
    assert abs(ranks.mean() - 0.5) < 0.01
    assert abs(ranks.std() - 12**-0.5) < 0.01
    flat = ranks.flatten(0, 1)
    correlation = torch.corrcoef(flat) - torch.eye(6)
    assert correlation.abs().max() < 0.06
    part = policy.initial_scores(torch.arange(100, 200), 3, 2, 0)
    assert torch.equal(part, ranks[:, :, 100:200])


def test_random_ranks_agree_across_tensor_parallel_ranks() -> None:
    policy = get_policy("random")
    whole = policy.initial_scores(torch.arange(50), 2, 4, 0)
    second = policy.initial_scores(torch.arange(50), 2, 2, 2)
    assert whole is not None
    assert torch.equal(whole[:, 2:], second)
