# SPDX-License-Identifier: Apache-2.0
"""What is watched is the reference's: its attention, and what it keeps with a fixed k."""

from __future__ import annotations

import pytest
import torch

from loadtest.theory.watched import Plan, Watched
from tests.families.random_models import VOCABULARY
from tests.reference.h2o import Reference

pytestmark = pytest.mark.usefixtures("single_thread")

PROMPT, AFTER = 50, 30


class Fixed(Reference):
    """The reference, of a fixed number of tokens."""

    tokens = 0

    def _budget(self, rest: int) -> int:
        return min(rest, self.tokens)


@pytest.fixture(scope="module")
def model(directory: str) -> Watched:
    return Watched(directory, 1.0, 0.5, 1, floor=1)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (1, PROMPT + AFTER), generator=source)


def test_attention_adds_up_to_the_references_scores(
    directory: str, model: Watched, tokens: torch.Tensor
) -> None:
    queries = torch.tensor([0, 7, AFTER - 1])
    found = model.watch(tokens[:, :PROMPT], tokens[:, PROMPT:], queries)
    assert found.seen.tolist() == list(range(PROMPT, PROMPT + AFTER + 1))
    reference = Reference(directory, 1.0, 0.5, 1, floor=1)
    reference.read(tokens)
    for layer, cache in reference.layers.items():
        scores = found.totals(layer)
        assert scores.shape == (2, AFTER + 1, PROMPT + AFTER)
        torch.testing.assert_close(scores[:, -1].float(), cache.scores[0], rtol=1e-4, atol=1e-5)
        assert not scores[:, 0, PROMPT:].any()
        each = found.probabilities[layer]
        torch.testing.assert_close(each.sum(2), found.given[layer][:, queries].movedim(1, 0))
        torch.testing.assert_close(found.values[layer], cache.values[0], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_kept_sets_of_every_plan_are_the_references(
    directory: str, model: Watched, tokens: torch.Tensor
) -> None:
    model.watch(tokens[:, :PROMPT], tokens[:, PROMPT:], torch.tensor([0]))
    plans = [Plan(20, 10), Plan(12, 0), Plan(30, 15)]
    runs = model.evict_along(tokens[:, PROMPT:], plans)
    assert model.seen == PROMPT and model.held == PROMPT
    for plan, run in zip(plans, runs, strict=True):
        assert run.plan == plan
        assert bool((run.kept.sum(-1) == plan.budget).all())
        reference = Fixed(directory, 1.0, plan.recent / plan.budget, 1, floor=1)
        reference.tokens = plan.budget
        reference.read(tokens[:, :PROMPT])
        for step in range(AFTER + 1):
            reference._evict()
            for layer, cache in reference.layers.items():
                held = run.kept[step, layer, :, : PROMPT + step]
                assert torch.equal(held, cache.alive[0]), (plan, step, layer)
            if step < AFTER:
                at = PROMPT + step
                reference._forward(tokens[:, at : at + 1])
        for layer, cache in reference.layers.items():
            torch.testing.assert_close(run.scores[layer], cache.scores[0], rtol=1e-4, atol=1e-5)
