# SPDX-License-Identifier: Apache-2.0
"""The policies of the last release and the ranks that replace them: the same scores, to the bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.policies import EQUAL_HEADS_POLICIES, PROMPT_END_POLICIES
from h2o_vllm.policy import get_policy
from h2o_vllm.policy.formulas import new_scores
from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.presets import ALIASES
from h2o_vllm.policy.ranks import NEVER, Collects
from tests.policy.cases import candidates_of

OLD = [*ALIASES, "h2o", "snapkv"]


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize(
    ("known", "count", "in_prompt"),
    [(0, 48, False), (16, 64, False), (48, 48, False), (16, 64, True)],
)
def test_scores_are_the_same_to_the_bit(name: str, known: int, count: int, in_prompt: bool) -> None:
    if in_prompt and name in PROMPT_END_POLICIES:
        return
    policy = Policy.parse(name, calibrated=True)
    scores = torch.rand(2, 3, count, generator=torch.Generator().manual_seed(4))
    given = candidates_of(scores, known, 0 if known == 0 else 100, 200)
    late = None if in_prompt else given.late
    old = get_policy(name).eviction_scores(replace(given, late=late, in_prompt=in_prompt))
    if policy.collects is not Collects.ALL:
        late = scores
    new = new_scores(policy.indices(in_prompt=in_prompt), replace(given, late=late))
    assert torch.equal(scores if old is None else old, scores if new is None else new)


@pytest.mark.parametrize("name", OLD)
def test_the_rest_is_the_same(name: str) -> None:
    policy, old, config = (
        Policy.parse(name, calibrated=True),
        get_policy(name),
        H2OConfig(kv_calibration="unread"),
    )
    assert policy.moves_tokens and policy.needs_scores == old.needs_scores
    assert policy.recent == config.recent_of(name)
    assert policy.shares == (config.heads_of(name) == "shared")
    assert policy.may_share == (name not in EQUAL_HEADS_POLICIES)
    assert policy.may_bound == (name not in PROMPT_END_POLICIES)
    assert (policy.collects is not Collects.NOTHING) == old.scores_attention
    for prompt in (1, 32, 33, 500):
        queries = old.scored_prompt_queries
        first = (
            max(0, prompt - (prompt if queries is None else queries))
            if old.scores_attention
            else NEVER
        )
        assert policy.first_scored(prompt) == first
        late = old.late_prompt_queries
        assert policy.late_from(prompt) == (NEVER if late is None else max(0, prompt - late))


def test_window_is_the_same() -> None:
    policy = Policy.parse("window")
    assert not policy.moves_tokens and not policy.needs_scores and not policy.may_share
    assert np.isclose(policy.recent, H2OConfig().recent_of("window"))


def test_auto_is_what_stood_for_no_policy() -> None:
    for calibrated in (False, True):
        config = H2OConfig(kv_calibration="unread" if calibrated else None)
        for bounded in (False, True):
            name = config.default_policy_of(bounded=bounded)
            assert Policy.parse("auto", calibrated=calibrated, bounded=bounded) == Policy.parse(
                name, calibrated=calibrated
            )
