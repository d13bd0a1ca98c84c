# SPDX-License-Identifier: Apache-2.0
"""One matrix over all policies. What is particular to each: ``test_each_policy.py``."""

import sys
from dataclasses import replace

import pytest
import torch

from h2o_vllm.config.policies import (
    POLICIES,
    PROMPT_END_POLICIES,
    RECENT_SHARES,
    ZAP_POLICIES,
)
from h2o_vllm.policy import Candidates, best_rank, get_policy
from tests.policy.cases import candidates_of

MATRIX = POLICIES[:-1]
"""All but ``full``, which is never asked."""


def test_every_configurable_policy_exists() -> None:
    assert [get_policy(name).name for name in POLICIES] == list(POLICIES)


def test_who_scores_the_prompts_end_alone_is_listed_for_the_configuration() -> None:
    """It is checked where no policy has been imported."""
    policies = {name: get_policy(name) for name in POLICIES}
    ends = [
        name
        for name, policy in policies.items()
        if policy.scored_prompt_queries is not None and name not in ZAP_POLICIES
    ]
    assert ends == [*PROMPT_END_POLICIES]


def test_who_foretells_is_listed_for_the_configuration() -> None:
    """Nobody else can do without a calibration."""
    known = candidates_of(torch.rand(1, 1, 40), 0, 0, 100)
    foretelling = []
    for name in POLICIES:
        try:
            get_policy(name).eviction_scores(replace(known, foretold=None))
        except AssertionError:
            foretelling.append(name)
    assert foretelling == [*ZAP_POLICIES]


def test_who_ranks_in_several_ways_leaves_less_to_the_newest() -> None:
    """And so does who knows what of the prompt is needed."""
    several = [name for name in POLICIES if type(get_policy(name)).__module__ == best_rank.__name__]
    assert RECENT_SHARES.keys() == {*several, *ZAP_POLICIES}


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("num_doomed", [1, 3, 7])
def test_a_split_frees_what_it_was_asked_to(name: str, first: bool, num_doomed: int) -> None:
    candidates = [0, 1, 4, 5, 6, 9, 12]
    heavy, doomed = get_policy(name).split(candidates, num_doomed, first=first)
    assert len(doomed) == num_doomed
    assert list(doomed) == sorted(doomed)
    assert set(doomed) <= set(candidates)
    if get_policy(name).moves_tokens:
        assert sorted(heavy + doomed) == candidates
    else:
        assert heavy == ()


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("num_doomed", [1, 4])
def test_protected_blocks_stay(name: str, num_doomed: int) -> None:
    """In place, or as room for their tokens, which rank above all others."""
    policy, candidates = get_policy(name), list(range(7))
    heavy, doomed = policy.split(candidates, num_doomed, first=True, protected=3)
    assert len(heavy) >= 3 if policy.moves_tokens else min(doomed) >= 3


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize(("known", "count"), [(0, 40), (16, 48), (48, 48)])
def test_rescoring_gives_finite_scores_head_by_head(name: str, known: int, count: int) -> None:
    """The scores of some heads do not depend on the others (law 11), nor change the given ones."""
    policy = get_policy(name)
    scores = torch.rand(2, 4, count, generator=torch.Generator().manual_seed(1))
    given = candidates_of(scores.clone(), known, 100, 200)
    new = policy.eviction_scores(given)
    assert torch.equal(given.scores, scores)
    assert policy.scores_at_eviction or new is None
    if new is None:
        return
    assert new.shape == scores.shape and new.dtype == torch.float32
    assert new.isfinite().all()
    assert given.late is not None
    measures = (lambda: given.key_likeness()[:, 1:3], lambda: given.value_distances()[:, 1:3])
    late = given.late[:, 1:3]
    foretold = given.foretold
    assert foretold is not None
    part = policy.eviction_scores(
        Candidates(
            scores[:, 1:3], known, 100, 200, *measures, late, foretold=lambda: foretold()[:, 1:3]
        )
    )
    assert part is not None
    torch.testing.assert_close(part, new[:, 1:3], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", MATRIX)
def test_what_a_policy_says_of_itself_fits_together(name: str) -> None:
    policy = get_policy(name)
    assert policy.moves_tokens or not (policy.scores_attention or policy.scores_at_eviction)
    assert policy.scores_attention or policy.scored_prompt_queries is None
    assert policy.scores_attention or not policy.last_query_only
    assert policy.scored_prompt_queries is None or policy.scored_prompt_queries > 0
    if policy.late_prompt_queries is not None:
        assert policy.scores_attention and policy.scores_at_eviction and not policy.last_query_only
        assert policy.scored_prompt_queries is None
    module = sys.modules[type(policy).__module__]
    assert "arxiv.org" in f"{module.__doc__} {type(policy).__doc__}" or name == "random"
