# SPDX-License-Identifier: Apache-2.0
"""Each measure on attention made by hand, of which the answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadtest.theory.functions import FUNCTIONS
from loadtest.theory.future import foretold, rankers
from loadtest.theory.local import errors
from loadtest.theory.optimum import reached
from loadtest.theory.output import output_kept, score_sum
from loadtest.theory.ranks import rank_correlation
from loadtest.theory.returns import Triples, draw, failures
from loadtest.theory.steps import GREEDY, changes, kept_exactly
from loadtest.theory.watched import Eviction, Plan


def masks(*rows: str) -> torch.Tensor:
    """``x.`` keeps the first of two tokens."""
    return torch.tensor([[sign == "x" for sign in row] for row in rows])


def totals(*rows: list[float]) -> torch.Tensor:
    """Scores of one head, step by step, [1, I, S]."""
    return torch.tensor([rows], dtype=torch.float64)


class TestSteps:
    # Five steps behind two tokens; all that queries give goes to the first token, one unit a step.
    RISING = totals(*([10.0 + step, 1, 0, 0, 0, 0, 0] for step in range(6)))
    SEEN = torch.arange(2, 8)

    def figures(self, name: str, scores: torch.Tensor) -> dict[str, float]:
        found = changes(FUNCTIONS[name], scores, self.SEEN[: scores.shape[1]], 1)
        return {key: float(value) for key, value in found.items()}

    def test_sums_never_fall_and_opt_grows_by_what_a_step_gives(self) -> None:
        found = self.figures("h2o", self.RISING)
        assert found["theta"] == found["theta_any"] == found["gamma_stated"] == 0
        assert found["gamma"] == pytest.approx(1 / 11)
        assert found["gamma_median"] == pytest.approx(1 / 13)
        assert found["alpha"] == pytest.approx(10 * 5 / 11)
        assert found["alpha_all"] == pytest.approx(10 * 7 / 11)
        assert found["promised"] == pytest.approx(GREEDY * (10 / 11) ** 5)
        # Step by step the product is opt at the beginning over opt at the end.
        assert found["promised_by_step"] == pytest.approx(GREEDY * 10 / 15)
        assert found["reached"] == found["reached_least"] == 1

    def test_means_fall_where_queries_give_nothing(self) -> None:
        # The first token has been seen by two queries, then by three.
        found = self.figures("h2o-norm", totals([6.0, 0, 0], [6.0, 0, 0]))
        assert found["theta"] == found["theta_any"] == pytest.approx(1 / 3)
        assert found["gamma_stated"] == pytest.approx(1 / 3)
        assert found["gamma"] == 0

    def test_under_a_logarithm_a_small_alpha_promises_little(self) -> None:
        found = self.figures("h2o, log(z + 1)", self.RISING)
        gamma = 1 - math.log(11) / math.log(12)
        assert found["gamma"] == pytest.approx(gamma)
        product = GREEDY * (1 - gamma) ** 5 * math.log(16)
        assert found["promised"] == pytest.approx((math.exp(product) - 1) / 15)

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_h_can_be_undone(self, name: str) -> None:
        values = torch.tensor([0.0, 0.5, 70.0], dtype=torch.float64)
        torch.testing.assert_close(FUNCTIONS[name].undone(FUNCTIONS[name].h(values)), values)

    def test_what_is_gone_does_not_come_back(self) -> None:
        scores = totals([2.0, 1, 0, 0], [2.0, 5, 1, 0], [2.0, 6, 1, 3])
        kept = kept_exactly(scores, torch.tensor([2, 3, 4]), 1)
        assert torch.equal(kept[0], masks("x...", "x...", "...x"))
        found = changes(FUNCTIONS["h2o"], scores, torch.tensor([2, 3, 4]), 1)
        assert float(found["reached"]) == 3 / 6
        assert float(found["reached_least"]) == 2 / 5


def test_errors_of_local_scores() -> None:
    true = totals([4.0, 3, 0.1, 3.5, 0, 0], [4.0, 3, 2, 1, 1, 0], [5.0, 3, 6, 1, 1, 1])
    kept = masks("x.xx..", "xx..x.", "x.x..x")[:, None, None]
    mine = torch.tensor([[[6.0, 9, 5, 9, 9, 2]]])
    run = Eviction(Plan(3, 1), kept, mine)
    found = {k: float(v) for k, v in errors(run, 0, true, torch.tensor([4, 5, 6])).items()}
    # Two of three scores are too high by 1 each, one is too low by 1; opt is 5 + 6 + 3.
    assert found["eps"] == pytest.approx(2 / 14)
    assert found["beta"] == pytest.approx(10 * 2 * 2 / 14)
    assert found["inflation"] == pytest.approx(13 / 12)
    assert found["ranks"] == pytest.approx(0.5)
    assert found["same_best"] == pytest.approx((2 + 2 + 2) / 9)
    # The heavy two by true scores, the newest apart: 0 and 1, of which one is kept; then both are, twice.
    assert found["same_heavy"] == pytest.approx(5 / 6)
    assert found["reached"] == pytest.approx(12 / 14)
    assert found["reached_least"] == pytest.approx(7.6 / 10.5)
    # Each set is worth no less than the one before it: 8 and 7, 12 and 9.
    assert found["worse"] == 0


def test_a_new_token_that_has_to_stay_can_make_the_set_worth_less() -> None:
    true = totals([4.0, 3, 0], [4.0, 3, 1])
    kept = masks("xx.", "x.x")[:, None, None]
    run = Eviction(Plan(2, 1), kept, true[None, 0, -1:])
    assert float(errors(run, 0, true, torch.tensor([2, 3]))["worse"]) == 1


# The first and the last key carry the output; the two between them cancel out.
PROB = torch.tensor([[0.4, 0.22, 0.22, 0.16]])
VALUES = torch.tensor([[1.0], [10.0], [-10.0], [1.0]])


class TestOutput:
    def test_it_is_attention_over_what_is_kept(self) -> None:
        source = torch.Generator().manual_seed(0)
        logits = torch.randn(3, 6, generator=source, dtype=torch.float64)
        values = torch.randn(6, 4, generator=source, dtype=torch.float64)
        kept = masks("xxxxxx", "......", "x..xx.")
        full = logits.softmax(-1) @ values
        part = logits.masked_fill(~kept[2], -math.inf).softmax(-1) @ values
        wanted = [1, 0, 1 - float((part - full).norm() / full.norm())]
        found = output_kept(logits.softmax(-1), values)(kept)
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))

    def test_scores_are_shares(self) -> None:
        found = score_sum(torch.tensor([[0.5, 0.25], [0.5, 0.75]]))(masks("xx", "x.", ".."))
        assert found.tolist() == [1, 0.5, 0]

    def test_keys_that_cancel_out_fail_diminishing_returns_and_monotony(self) -> None:
        triples = Triples(
            masks("x...", "x..."), masks("xx..", "x.x."), masks("x.x.", "xx.."),
            masks("xxx.", "xxx."),
        )  # fmt: skip
        assert set(failures(output_kept(PROB, VALUES), triples).values()) == {1.0}
        assert set(failures(score_sum(PROB), triples).values()) == {0.0}

    def test_the_most_attended_keys_need_not_be_the_best(self) -> None:
        found = reached(output_kept(PROB, VALUES), PROB, 2, torch.Generator().manual_seed(0))
        assert found["greedy"] == pytest.approx(1)
        assert found["top-k"] < 0
        # The last key goes first, and then nothing of those that cancel out can.
        assert found["evict"] == pytest.approx(0)


class TestReturns:
    @given(st.integers(3, 12), st.integers(0, 99))
    def test_drawn_sets_are_nested_and_the_token_is_new(self, n: int, seed: int) -> None:
        small, large, small_and, large_and = draw(n, 20, torch.Generator().manual_seed(seed))
        assert bool((small <= large).all()) and bool((small.sum(1) < large.sum(1)).all())
        assert bool((small.sum(1) > 0).all())
        further = large_and & ~large
        assert bool((further.sum(1) == 1).all())
        assert torch.equal(small_and, small | further)

    @pytest.mark.parametrize(
        ("worth", "returns", "monotony"),
        [
            (lambda size: size**2, 1, 0),
            (lambda size: size, 0, 0),
            (lambda size: size.sqrt(), 0, 0),
            (lambda size: -size, 0, 1),
        ],
        ids=["supermodular", "modular", "submodular", "falling"],
    )
    def test_what_is_known_to_fail_fails_always(
        self, worth: object, returns: int, monotony: int
    ) -> None:
        assert callable(worth)
        triples = draw(9, 200, torch.Generator().manual_seed(0))
        found = failures(lambda sets: worth(sets.sum(1).double()), triples)
        assert (found["returns"], found["monotony"]) == (returns, monotony)
        assert (found["returns_large"], found["monotony_large"]) == (returns, monotony)


class TestFuture:
    COMING = torch.tensor([[8.0, 1, 4, 2]])

    def test_whoever_knows_it_finds_all(self) -> None:
        found = foretold(self.COMING, self.COMING, 2)
        assert [float(found[key]) for key in ("ranks", "same", "caught")] == pytest.approx([1] * 3)

    def test_the_opposite_finds_none(self) -> None:
        found = foretold(-self.COMING, self.COMING, 2)
        assert float(found["ranks"]) == pytest.approx(-1)
        assert float(found["same"]) == 0
        assert float(found["caught"]) == pytest.approx(3 / 12)

    def test_rankers(self) -> None:
        found = rankers(torch.tensor([[8.0, 3, 4, 1]]), torch.Generator().manual_seed(0))
        assert found["h2o"].tolist() == [[8, 3, 4, 1]]
        assert found["h2o-norm"].tolist() == [[2, 1, 2, 1]]
        assert found["recency"].tolist() == [[0, 1, 2, 3]]
        assert len(set(found["random"][0].tolist())) == 4

    def test_rank_correlation_is_spearmans(self) -> None:
        # Squared differences of ranks: 0, 1, 1, 0; 1 - 6 * 2 / (4 * 15).
        mine, other = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 30, 20, 400])
        assert float(rank_correlation(mine, other)) == pytest.approx(0.8)
