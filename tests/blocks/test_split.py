# SPDX-License-Identifier: Apache-2.0
"""Which blocks an eviction frees."""

import pytest

from h2o_vllm.blocks.counts.split import drop_oldest, rank_all


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("num_doomed", [1, 3, 7])
def test_a_split_frees_what_it_was_asked_to(first: bool, num_doomed: int) -> None:
    candidates = [0, 1, 4, 5, 6, 9, 12]
    ranked = rank_all(candidates, num_doomed, first=first)
    dropped = drop_oldest(candidates, num_doomed)
    assert sorted(ranked.heavy + ranked.doomed) == candidates and dropped.heavy == ()
    for doomed in (ranked.doomed, dropped.doomed):
        assert len(doomed) == num_doomed
        assert list(doomed) == sorted(doomed)
        assert set(doomed) <= set(candidates)


def test_ranking_frees_the_published_prompt_first_and_the_youngest_block_later() -> None:
    assert rank_all([0, 1, 2, 3, 4], 3, first=True).doomed == (0, 1, 2)
    assert rank_all([3, 4, 9], 1, first=False).doomed == (9,)


def test_dropping_keeps_the_first_block_while_it_can() -> None:
    assert drop_oldest([0, 1, 2, 3], 2).doomed == (1, 2)
    assert drop_oldest([0, 7], 1).doomed == (7,)
    assert drop_oldest([0, 7], 2).doomed == (0, 7)
    assert drop_oldest([2, 3, 4], 2).doomed == (2, 3)
