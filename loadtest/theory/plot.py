# SPDX-License-Identifier: Apache-2.0
"""The picture of what ``loadtest.theory`` measured. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.common import plots
from loadtest.common.results import Row
from loadtest.common.tables import pick
from loadtest.theory.figures import by_head, by_query, cases, texts_of
from loadtest.theory.functions import FUNCTIONS
from loadtest.theory.future import HORIZONS, RANKERS
from loadtest.theory.measure import CASES, GROUNDS
from loadtest.theory.optimum import WAYS
from loadtest.theory.steps import GREEDY

__all__ = ["plot"]

COLOURS = (plots.RED, plots.BLUE, plots.YELLOW, plots.LIGHT)


def plot(rows: list[Row], path: Path) -> Path:
    """Six panels; bands reach from the least to the most head of a layer."""
    runs, heads = pick(rows, kind="run"), pick(rows, kind="heads")
    figure, axes = plots.panels(3, 2, size=(13, 7.2))
    parts = (_alpha, _eps, _kept, _returns, _optimum, _future)
    for axis, part in zip(axes, parts, strict=True):
        part(axis, heads)
        axis.grid(alpha=0.25)
        plots.legend(axis)
    facts = (runs[0]["settings"]["model"], "float32", f"{len(texts_of(heads))} texts")
    return plots.save(figure, path, plots.caption(runs[0], *facts))


def _middle(heads: list[Row]) -> float:
    """The budget at which functions are compared."""
    budgets = sorted({budget for _, budget in cases(heads, "steps") if budget is not None})
    return budgets[(len(budgets) - 1) // 2]


def _alpha(axis: Any, heads: list[Row]) -> None:
    budget = _middle(heads)
    for colour, case in zip(COLOURS, FUNCTIONS, strict=False):
        values = by_head(heads, "alpha", measure="steps", case=case, budget=budget)
        _band(axis, values, colour, case)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_yscale("log")
    _titled(axis, f"alpha that the theorem needs; it has to be below 1 (budget {budget:g})")


def _eps(axis: Any, heads: list[Row]) -> None:
    _local(axis, heads, "eps", "eps of the cut cache's scores, % of opt")


def _kept(axis: Any, heads: list[Row]) -> None:
    _local(axis, heads, "same_heavy", "heavy tokens that true scores would keep, too, %")


def _local(axis: Any, heads: list[Row], key: str, title: str) -> None:
    served = next(iter(CASES))
    found = [(case, budget) for case, budget in cases(heads, "local") if case == served]
    for colour, (case, budget) in zip(COLOURS, found, strict=False):
        values = by_head(heads, key, measure="local", case=case, budget=budget)
        _band(axis, 100 * values, colour, f"budget {budget:g}")
    _titled(axis, title)


def _returns(axis: Any, heads: list[Row]) -> None:
    shown = (
        ("returns", "output", "no diminishing returns"),
        ("monotony", "output", "not monotone"),
        ("returns", "scores", "no diminishing returns: sum of scores"),
    )
    for colour, (key, kind, label) in zip(COLOURS, shown, strict=False):
        values = by_head(heads, key, measure="returns", case=f"{kind}, {GROUNDS[1]}", budget=None)
        _band(axis, 100 * values, colour, label)
    _titled(axis, "attention output, % of nested pairs of the most attended keys")


def _optimum(axis: Any, heads: list[Row]) -> None:
    for colour, way in zip(COLOURS, WAYS, strict=True):
        ratios = np.sort(by_query(heads, way, measure="optimum", case=GROUNDS[1]))
        axis.plot(ratios, np.arange(1, len(ratios) + 1) / len(ratios), color=colour, label=way)
    axis.axvline(GREEDY, color="black", linewidth=0.8)
    axis.set_xlim(0, 1.02)
    axis.set_ylabel("share of instances below")
    axis.set_title("attention output reached, over the optimum; line: 1 - 1/e", fontsize=plots.NOTE)


def _future(axis: Any, heads: list[Row]) -> None:
    budget = _middle(heads)
    measured = pick(heads, measure="future")[0]["values"]
    ahead = max(horizon for horizon in HORIZONS if f"same@{horizon}" in measured)
    for colour, case in zip(COLOURS, RANKERS, strict=True):
        key = f"same@{ahead}"
        values = by_head(heads, key, measure="future", case=case, budget=budget)
        _band(axis, 100 * values, colour, case)
    _titled(axis, f"of the k most attended in the next {ahead} tokens, % foretold ({budget:g})")


def _band(axis: Any, values: NDArray[np.float64], colour: str, label: str) -> None:
    """Median and range of [L, KH] over heads."""
    layers = np.arange(len(values))
    axis.plot(layers, np.median(values, axis=1), color=colour, label=label, linewidth=1.3)
    axis.fill_between(
        layers, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.2, linewidth=0
    )


def _titled(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=plots.NOTE)
    axis.set_xlabel("layer")
