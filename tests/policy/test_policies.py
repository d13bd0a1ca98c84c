# SPDX-License-Identifier: Apache-2.0
"""Which blocks a policy gives up, and what the random policy's ranks look like."""

import pytest
import torch

from h2o_vllm.config import POLICIES
from h2o_vllm.policy import get_policy


def test_every_configurable_policy_exists() -> None:
    assert [get_policy(name).name for name in POLICIES] == list(POLICIES)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
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


def test_h2o_frees_the_published_prompt_first_and_the_youngest_block_later() -> None:
    policy = get_policy("h2o")
    assert policy.split([0, 1, 2, 3, 4], 3, first=True).doomed == (0, 1, 2)
    assert policy.split([3, 4, 9], 1, first=False).doomed == (9,)


def test_window_keeps_the_first_block_while_it_can() -> None:
    policy = get_policy("window")
    assert policy.split([0, 1, 2, 3], 2, first=True).doomed == (1, 2)
    assert policy.split([0, 7], 1, first=False).doomed == (7,)
    assert policy.split([0, 7], 2, first=False).doomed == (0, 7)


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
