# SPDX-License-Identifier: Apache-2.0
"""Which blocks an eviction frees."""

import pytest

from h2o_vllm.blocks.counts.split import drop_oldest, fresh_blocks, rank_all


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


@pytest.mark.parametrize(
    ("ranked", "start", "until", "num_doomed", "first", "fresh"),
    [
        # The end is 10 .. 12.
        ([], 1, 7, 3, True, (1, 2, 3, 4, 5, 6)),
        ([], 8, 12, 1, True, (8, 9)),
        # Heavy blocks before the end: those behind it are not ranked yet.
        ([], 8, 16, 1, True, (8, 9)),
        # All before it go: the heavy ones lie behind it.
        ([], 8, 16, 2, True, (8, 9, 13, 14, 15)),
        ([], 10, 16, 2, True, (13, 14, 15)),
        # Later ones are ranked to be freed.
        ([5, 6], 10, 16, 1, False, (13,)),
        ([5, 6], 9, 16, 2, False, (9, 13, 14)),
        ([5, 6], 14, 16, 1, False, (14,)),
        ([5, 6], 9, 11, 1, False, (9,)),
        ([14, 15], 16, 19, 1, False, (16, 17, 18)),
        ([], 10, 15, 1, False, (13, 14)),
    ],
)
def test_heavy_blocks_lie_on_one_side_of_the_protected_end(
    ranked: list[int], start: int, until: int, num_doomed: int, first: bool, fresh: tuple[int, ...]
) -> None:
    found = fresh_blocks(ranked, range(start, until), range(10, 13), num_doomed, first=first)
    assert found == fresh
    split = rank_all([*ranked, *found], num_doomed, first=first)
    assert len({index > 12 for index in split.heavy}) < 2
