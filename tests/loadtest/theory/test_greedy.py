# SPDX-License-Identifier: Apache-2.0
"""What one step of H2O is worth, and what greedy steps guarantee: the same code that the measurement uses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadtest.theory.greedy import SetFunction, best, drop_lowest, evict, evict_one, greedy, subsets
from loadtest.theory.ranks import top
from loadtest.theory.steps import GREEDY


def sum_of(scores: torch.Tensor) -> SetFunction:
    return lambda masks: masks.double() @ scores


def coverage(sets: list[set[int]], weights: list[int]) -> SetFunction:
    """Weight of the union: monotone and submodular."""
    covers = torch.tensor([[place in one for place in range(len(weights))] for one in sets])
    worth = torch.tensor(weights, dtype=torch.float64)
    return lambda masks: ((masks[:, :, None] & covers).any(1)).double() @ worth


# Whole numbers: their sums are exact, and there are ties.
scored = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=2, max_size=9)


@given(scored)
def test_dropping_the_lowest_score_is_the_best_set_of_k_of_those_there(
    tokens: list[tuple[int, bool]],
) -> None:
    scores = torch.tensor([score for score, _ in tokens], dtype=torch.float64)
    there = torch.tensor([kept for _, kept in tokens])
    there[:2] = True
    value = sum_of(scores)
    smaller = subsets(len(tokens), int(there.sum()) - 1)
    within = smaller[(smaller & ~there).sum(1) == 0]
    dropped = drop_lowest(scores, there)
    assert not (dropped & ~there).any() and int(dropped.sum()) == int(there.sum()) - 1
    assert float(value(dropped[None])) == float(value(within).max())
    assert torch.equal(dropped, evict_one(value, there))


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8), st.data())
def test_greedy_steps_either_way_are_exact_where_worth_adds_up(
    numbers: list[int], data: st.DataObject
) -> None:
    scores = torch.tensor(numbers, dtype=torch.float64)
    k = data.draw(st.integers(1, len(numbers) - 1))
    value = sum_of(scores)
    most = float(value(subsets(len(numbers), k)).max())
    for found in (greedy(value, len(numbers), k), evict(value, len(numbers), k), top(scores, k)):
        assert int(found.sum()) == k
        assert float(value(found[None])) == most


covered = st.lists(st.sets(st.integers(0, 7), max_size=5), min_size=2, max_size=7)


@given(covered, st.lists(st.integers(1, 9), min_size=8, max_size=8), st.data())
def test_greedy_reaches_its_share_of_the_best_coverage(
    sets: list[set[int]], weights: list[int], data: st.DataObject
) -> None:
    value = coverage(sets, weights)
    k = data.draw(st.integers(1, len(sets) - 1))
    reached = float(value(greedy(value, len(sets), k)[None]))
    assert reached >= GREEDY * float(value(subsets(len(sets), k)).max())


def test_greedy_is_not_the_optimum_of_coverage() -> None:
    value = coverage([{0, 1, 2, 3}, {0, 1, 4}, {2, 3, 5}], [1] * 6)
    assert greedy(value, 3, 2).tolist() == [True, True, False]
    assert best(value, subsets(3, 2)).tolist() == [False, True, True]


@pytest.mark.parametrize(("n", "k", "count"), [(5, 3, 10), (4, 4, 1), (14, 5, 2002)])
def test_subsets_are_all_there(n: int, k: int, count: int) -> None:
    every = subsets(n, k)
    assert every.shape == (count, n) and bool((every.sum(1) == k).all())
    assert len({tuple(one) for one in every.tolist()}) == count
