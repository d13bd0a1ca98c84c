# SPDX-License-Identifier: Apache-2.0
"""Tables of what ``loadtest.theory`` measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtest.common.results import Row
from loadtest.common.tables import markdown_table, pick, provenance
from loadtest.theory.figures import by_head, by_query, cases, spread, texts_of
from loadtest.theory.future import HORIZONS
from loadtest.theory.optimum import WAYS
from loadtest.theory.steps import GREEDY

__all__ = ["report"]

Columns = Sequence[tuple[str, str, float, str]]
"""Heads, keys of values, what these are multiplied with, and how they are written."""

STEPS = (
    ("theta", "theta", 1, "{:.2g}"),
    ("theta, any set", "theta_any", 1, "{:.2g}"),
    ("gamma as stated", "gamma_stated", 1, "{:.2g}"),
    ("gamma as used", "gamma", 1, "{:.2g}"),
    ("alpha", "alpha", 1, "{:.3g}"),
    ("alpha, n of all tokens", "alpha_all", 1, "{:.3g}"),
    ("promised, % of opt", "promised", 100, "{:.2g}"),
    ("promised step by step, %", "promised_by_step", 100, "{:.2g}"),
    ("reached, %", "reached", 100, "{:.1f}"),
)
LOCAL = (
    ("eps, % of opt", "eps", 100, "{:.1f}"),
    ("beta, in opt", "beta", 1, "{:.3g}"),
    ("kept scores over true ones", "inflation", 1, "{:.3f}"),
    ("their rank correlation", "ranks", 1, "{:.3f}"),
    ("of the best k kept, %", "same_best", 100, "{:.0f}"),
    ("of the heavy that true scores would keep, %", "same_heavy", 100, "{:.0f}"),
    ("reached, % of opt", "reached", 100, "{:.1f}"),
    ("least on the way, %", "reached_least", 100, "{:.1f}"),
    ("S worth less than before, % of steps", "worse", 100, "{:.0f}"),
)
RETURNS = (
    ("no diminishing returns, %", "returns", 100, "{:.1f}"),
    ("by more than 1 % of the output, %", "returns_large", 100, "{:.1f}"),
    ("not monotone, %", "monotony", 100, "{:.1f}"),
    ("by more than 1 %, %", "monotony_large", 100, "{:.1f}"),
)


def report(rows: list[Row], picture: str) -> str:
    """Markdown: a table for each measure."""
    runs, heads = pick(rows, kind="run"), pick(rows, kind="heads")
    settings, texts = runs[0]["settings"], texts_of(heads)
    return "\n".join(
        [
            f"# {picture}",
            "",
            f"![assumptions and guarantees of the paper's appendix D, by layer]({picture}.png)",
            "",
            f"{settings['model']}, float32; {len(texts)} texts of `loadtest.quality` "
            f"({', '.join(texts)}): {settings['prompt_tokens']} tokens read with full attention, "
            f"{settings['forced_tokens']} step by step after them. k is fixed, a share of the prompt. Cells: "
            "median over layers and KV heads of a head's mean over texts, and in brackets the least and the "
            "most of any head. What the words mean: the docstrings of `loadtest/theory`.",
            "",
            "## Steps: theta, gamma, alpha",
            "",
            "theta and gamma are the largest of all steps. alpha = 10 n max(theta, gamma as used) has to "
            "lie in (0, 1). Promised: (1 - 1/e) of the induction's own product, of opt at the end, h undone; "
            "step by step with each step's theta and gamma in place of the largest.",
            "",
            _table(heads, "steps", STEPS),
            "",
            "## Local scores: eps, beta",
            "",
            "beta = 10 n eps: from 1 on the promise is less than nothing.",
            "",
            _table(heads, "local", LOCAL),
            "",
            "## Diminishing returns and monotony of the attention output",
            "",
            f"{settings['triples']} nested pairs for each of {settings['queries']} queries a head. `scores` "
            "is the control: the sum that H2O maximises, which is modular.",
            "",
            _table(heads, "returns", RETURNS),
            "",
            "## Greedy against the optimum",
            "",
            f"Of {settings['keys']} keys {settings['kept']} are kept; shares of the best of all such sets, "
            "over queries, heads and texts.",
            "",
            _optimum(heads),
            "",
            "## Scores so far against attention to come",
            "",
            "Among the prompt's tokens. Random puts the budget's share of the best among its own.",
            "",
            *_future(heads),
            *provenance(runs),
        ]
    )


def _table(heads: list[Row], measure: str, columns: Columns) -> str:
    lines = []
    for case, budget in cases(heads, measure):
        wanted = {"measure": measure, "case": case, "budget": budget}
        cells = [
            spread(factor * by_head(heads, key, **wanted), style)
            for _, key, factor, style in columns
        ]
        lines.append([case, *([] if budget is None else [f"{budget:g}"]), *cells])
    first = ["", "budget"] if cases(heads, measure)[0][1] is not None else [""]
    return markdown_table([*first, *(column[0] for column in columns)], lines)


def _optimum(heads: list[Row]) -> str:
    lines = []
    for case, _ in cases(heads, "optimum"):
        for way in WAYS:
            ratios = by_query(heads, way, measure="optimum", case=case)
            least, low, middle = np.quantile(ratios, (0, 0.05, 0.5))
            below, exact = (ratios < GREEDY).mean(), (ratios > 1 - 1e-6).mean()
            lines.append(
                [case, way, f"{middle:.3f}", f"{low:.3f}", f"{least:.3f}",
                 f"{100 * below:.1f}", f"{100 * exact:.1f}", str(len(ratios))]
            )  # fmt: skip
    head = ["keys", "kept by", "median", "5 % are below", "least", "below 1 - 1/e, %",
            "optimal, %", "instances"]  # fmt: skip
    return markdown_table(head, lines)


def _future(heads: list[Row]) -> list[str]:
    """A table for each horizon."""
    parts = []
    for ahead in HORIZONS:
        columns = (
            ("rank correlation", f"ranks@{ahead}", 1, "{:.2f}"),
            ("of the best k found, %", f"same@{ahead}", 100, "{:.0f}"),
            ("attention caught, % of what the best k get", f"caught@{ahead}", 100, "{:.1f}"),
        )
        if columns[0][1] in pick(heads, measure="future")[0]["values"]:
            parts += [f"{ahead} tokens ahead:", "", _table(heads, "future", columns), ""]
    return parts
