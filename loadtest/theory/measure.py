# SPDX-License-Identifier: Apache-2.0
"""All measures of one text, as rows: a layer each, with a list over KV heads for every figure.

A row has ``text``, ``layer``, ``measure`` (a file of this room), ``case`` (what of it), ``budget`` (k as a
share of the prompt, or null) and ``values``. Values of ``optimum`` have a list of queries for every head.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from loadtest.common.results import Row
from loadtest.quality.reference_run import show_progress
from loadtest.theory.functions import FUNCTIONS
from loadtest.theory.future import HORIZONS, foretold, rankers
from loadtest.theory.local import errors
from loadtest.theory.optimum import reached
from loadtest.theory.output import output_kept, score_sum
from loadtest.theory.returns import draw, failures
from loadtest.theory.steps import changes
from loadtest.theory.watched import Attention, Plan, Watched

__all__ = ["CASES", "GROUNDS", "measure_text"]

GROUNDS = ("all keys", "most attended")
"""What sets are drawn from: everything, or the keys that decide what most sets are worth."""

ATTENDED = 64
"""How many these are."""

CASES = {"half recent": 0.5, "none recent": 0.0}
"""Shares of k that the newest tokens have, by name: what is served, and Algorithm 2."""


def measure_text(
    model: Watched, args: argparse.Namespace, name: str, prompt: Tensor, forced: Tensor
) -> Iterator[Row]:
    """The rows of one text: prompt [1, T] and what follows, [1, N]."""
    generator = torch.Generator().manual_seed(args.seed)
    queries = torch.randperm(forced.shape[1], generator=generator)[: args.queries].sort().values
    show_progress(f"{name}: full KV")
    attention = model.watch(prompt, forced, queries)
    parts = (_steps, _outputs, _future)
    for layer in range(len(attention.given)):
        show_progress(f"{name}: layer {layer + 1} of {len(attention.given)}")
        for part in parts:
            for row in part(args, attention, layer, generator):
                yield {"kind": "heads", "text": name, "layer": layer, **row}
    named = _plans(args.budgets, prompt.shape[1])
    show_progress(f"{name}: {forced.shape[1]} tokens with eviction")
    runs = model.evict_along(forced, list(named.values()))
    for (case, budget), run in zip(named, runs, strict=True):
        for layer in range(len(attention.given)):
            figures = errors(run, layer, attention.totals(layer), attention.seen)
            row = _row("local", case, budget, figures)
            yield {"kind": "heads", "text": name, "layer": layer, **row}


def _plans(budgets: list[float], prompt: int) -> dict[tuple[str, float], Plan]:
    """Real evictions by case and budget: each as it is served, one of them as Algorithm 2 has it."""
    served, plain = CASES
    middle = sorted(budgets)[(len(budgets) - 1) // 2]
    named = [*((served, budget) for budget in budgets), (plain, middle)]
    return {
        (case, budget): Plan(k := _tokens(budget, prompt), round(CASES[case] * k))
        for case, budget in named
    }


def _steps(
    args: argparse.Namespace, attention: Attention, layer: int, _: torch.Generator
) -> Iterator[Row]:
    totals, tokens = attention.totals(layer), attention.prompt.shape[2]
    for budget in args.budgets:
        for case, function in FUNCTIONS.items():
            figures = changes(function, totals, attention.seen, _tokens(budget, tokens))
            yield _row("steps", case, budget, figures)


def _outputs(
    args: argparse.Namespace, attention: Attention, layer: int, generator: torch.Generator
) -> Iterator[Row]:
    """``returns`` on average over queries, ``optimum`` query by query."""
    heads, queries = range(attention.prompt.shape[1]), range(args.queries)
    found = [
        [_output(args, attention, layer, head, query, generator) for query in queries]
        for head in heads
    ]
    for measure, case in found[0][0]:
        figures = {
            key: torch.tensor([[one[measure, case][key] for one in row] for row in found])
            for key in found[0][0][measure, case]
        }
        if measure == "returns":
            figures = {key: value.double().mean(1) for key, value in figures.items()}
        yield _row(measure, case, None, figures)


def _output(
    args: argparse.Namespace, attention: Attention, layer: int, head: int, query: int,
    generator: torch.Generator,
) -> dict[tuple[str, str], dict[str, float]]:  # fmt: skip
    """Figures of one query by measure and case: of all keys, and of those that get most attention."""
    seen = attention.prompt.shape[2] + int(attention.queries[query]) + 1
    prob = attention.probabilities[layer][query, head, :, :seen]
    values = attention.values[layer][head, :seen]
    chance = torch.randperm(seen, generator=generator)
    weight = prob.sum(0).argsort(descending=True)
    found = {}
    for case, ground, order in (
        (GROUNDS[0], chance, chance), (GROUNDS[1], weight[:ATTENDED], weight),
    ):  # fmt: skip
        triples = draw(len(ground), args.triples, generator)
        output = output_kept(prob[:, ground], values[ground])
        found["returns", f"output, {case}"] = failures(output, triples)
        found["returns", f"scores, {case}"] = failures(score_sum(prob[:, ground]), triples)
        few = order[: args.keys]
        output = output_kept(prob[:, few], values[few])
        found["optimum", case] = reached(output, prob[:, few], args.kept, generator)
    return found


def _future(
    args: argparse.Namespace, attention: Attention, layer: int, generator: torch.Generator
) -> Iterator[Row]:
    past = attention.prompt[layer].double()
    given = attention.given[layer][..., : past.shape[1]].double()
    for case, scores in rankers(past, generator).items():
        for budget in args.budgets:
            figures = {
                f"{key}@{ahead}": value
                for ahead in HORIZONS
                if ahead <= given.shape[1]
                for key, value in foretold(
                    scores, given[:, :ahead].sum(1), _tokens(budget, past.shape[1])
                ).items()
            }
            yield _row("future", case, budget, figures)


def _tokens(budget: float, prompt: int) -> int:
    """Of them k are kept."""
    return math.ceil(round(budget * prompt, 6))


def _row(measure: str, case: str, budget: float | None, figures: Mapping[str, Tensor]) -> Row:
    """Five significant digits tell more than the measurement knows."""
    values = {key: _rounded(value.tolist()) for key, value in figures.items()}
    return {"measure": measure, "case": case, "budget": budget, "values": values}


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}")
