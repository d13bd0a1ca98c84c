# SPDX-License-Identifier: Apache-2.0
"""Every set of ranks against the formulas of the papers, and what holds for all of them."""

from dataclasses import replace

import pytest
import torch

from h2o_vllm.policy.formulas import FORMULAS, first_scores
from h2o_vllm.policy.fresh import Fresh
from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.ranks import RANKS
from tests.policy.cases import JOINS, centre_of, fresh_of, measures_of, scored
from tests.reference.layer import Layer
from tests.reference.scores import ReferenceScores

HEADS, SIZE, QUERIES = 2, 8, 140
EVICTIONS = [(100, 0, 48), (140, 48, 96)]
"""Tokens seen, and the positions that are ranked for the first time, from .. to."""


def history() -> Layer:
    """One layer that has computed some tokens, of which none is gone."""
    gen = torch.Generator().manual_seed(6)
    keys, values = torch.randn(2, HEADS, QUERIES, SIZE, generator=gen)
    logits = torch.randn(HEADS, QUERIES, QUERIES, generator=gen)
    future = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    rows = logits.masked_fill(future, -torch.inf).softmax(-1)
    calibration = torch.randn(HEADS, HEADS * (SIZE // 2 + SIZE) + 1, generator=gen) / 4
    calibration[:, -1] -= 1.5
    alive = torch.ones(HEADS, QUERIES, dtype=torch.bool)
    return Layer(keys, values, alive, [rows], calibration=calibration)


def predicted_by(layer: Layer, start: int, end: int) -> torch.Tensor:
    """What the calibration says of some tokens, [1, KH, n]; a log-linear function of their KV."""
    pairs = torch.view_as_complex(
        torch.stack(layer.keys.chunk(2, -1), -1)[:, start:end].contiguous()
    ).abs()
    known = torch.cat([pairs, layer.values[:, start:end]], 2)
    joined = torch.cat(list(known), 1)
    weights, bias = layer.calibration[:, :-1], layer.calibration[:, -1:]
    return (weights @ joined.T + bias).clamp(max=0.0).exp()[None]


@pytest.mark.parametrize("prompt", [80, 150], ids=["behind-the-prompt", "inside"])
@pytest.mark.parametrize("name", JOINS)
def test_scores_are_those_of_the_papers(name: str, prompt: int) -> None:
    """Over two evictions, with attention between them."""
    layer, policy = history(), Policy.parse(name, calibrated=True)
    if prompt > QUERIES and not policy.may_bound:
        return
    rows, first, late_from = layer.rows(), policy.first_scored(prompt), policy.late_from(prompt)
    scores, ranked, before = torch.zeros(1, HEADS, QUERIES), [], 0
    keys, values = layer.keys[None], layer.values[None]
    first_ranked = slice(*EVICTIONS[0][1:])
    centre = centre_of(keys[:, :, first_ranked], values[:, :, first_ranked])
    for seen, start, end in EVICTIONS:
        scores += rows[None, :, max(before, first) : seen].sum(2)
        late = rows[None, :, late_from:seen].sum(2)
        given = Fresh(
            scores[:, None, :, start:end],
            torch.arange(start, end).float()[None, None],
            torch.full((1, 1, 1), float(seen)),
            late[:, None, :, start:end],
            {
                "predicted": predicted_by(layer, start, end)[:, None],
                **measures_of(keys[:, :, start:end], values[:, :, start:end], centre),
            },
        )
        ranks = Policy.of(policy.indices(in_prompt=seen < prompt))
        scores[..., start:end] = first_scores(ranks, given)[:, 0]
        ranked.append((seen, start, end))
        want = ReferenceScores(name, 0, prompt, ranked).of(layer)
        before = seen
    torch.testing.assert_close(scores[0, :, :end], want[:, :end], rtol=1e-5, atol=1e-6)


def test_every_rank_that_moves_tokens_has_a_formula() -> None:
    assert [*FORMULAS] == [rank.name for rank in RANKS if rank.moves and not rank.anew]


@pytest.mark.parametrize("name", JOINS)
def test_scores_are_finite_and_made_head_by_head(name: str) -> None:
    """The scores of some heads do not depend on the others (law 11), nor change the given ones."""
    scores = torch.rand(2, 4, 40, generator=torch.Generator().manual_seed(1))
    given = fresh_of(scores.clone(), 100, 200)
    new = scored(name, given)
    assert torch.equal(given.scores[:, 0], scores)
    assert new.shape == scores.shape and new.dtype == torch.float32 and new.isfinite().all()
    measures = {one: all_heads[:, :, 1:3] for one, all_heads in given.measures.items()}
    part = replace(
        given, scores=given.scores[:, :, 1:3], late=given.late[:, :, 1:3], measures=measures
    )
    assert torch.equal(scored(name, part), new[:, 1:3])


@pytest.mark.parametrize("name", JOINS)
def test_evictions_are_ranked_apart(name: str) -> None:
    """What several evictions get at once is what each gets alone (law 5)."""
    some = [fresh_of(torch.rand(2, 3, 16), 100 * i, 900 + i, seed=i) for i in range(3)]
    joined = Fresh(
        *(
            torch.cat([getattr(fresh, name) for fresh in some], dim)
            for name, dim in (("scores", 1), ("positions", 0), ("seen", 0), ("late", 1))
        ),
        {one: torch.cat([fresh.measures[one] for fresh in some], 1) for one in some[0].measures},
    )
    policy = Policy.parse(name, calibrated=True)
    together = first_scores(policy, joined)
    for number, fresh in enumerate(some):
        assert torch.equal(together[:, number], scored(name, fresh))


@pytest.mark.parametrize(
    "name", ["value+key", "end+key", "value+end+key", "predicted+value+end+key"]
)
def test_a_token_counts_by_its_best_rank_in_the_first_ones_unit(name: str) -> None:
    given = fresh_of(torch.rand(1, 1, 32, generator=torch.Generator().manual_seed(2)), 50, 100)
    ways = [scored(one, given)[0, 0].tolist() for one in name.split("+")]
    best = scored(name, given)[0, 0].tolist()
    ordered = sorted(ways[0], reverse=True)
    ranks = [in_order(way) for way in ways]
    for token, score in enumerate(best):
        found = [ordered[r[token]] * (1 - behind * 2.0**-20) for behind, r in enumerate(ranks)]
        assert score == pytest.approx(max(found), rel=1e-7)
    if not name.startswith("end"):  # whose pooled scores tie
        assert len(set(best)) == len(best), "tokens of one rank tie"
        by_rank = sorted(range(32), key=lambda one: min((r[one], w) for w, r in enumerate(ranks)))
        assert by_rank == sorted(range(32), key=lambda one: -best[one])


def in_order(scores: list[float]) -> list[int]:
    """The place of each score, highest first, of equal ones the earlier first."""
    order = sorted(range(len(scores)), key=lambda one: -scores[one])
    return [order.index(one) for one in range(len(scores))]


def test_tokens_of_one_rank_stay_apart_in_sums() -> None:
    """As long as all get the same, in float32."""
    mixed = scored("attention+key", fresh_of(torch.linspace(30.0, 31.0, 64)[None, None], 0, 200))
    for _ in range(100):
        mixed = mixed + torch.tensor(1e-3)
    assert len(mixed[0, 0].unique()) == 64
