# SPDX-License-Identifier: Apache-2.0
"""ROUGE by Google's ``rouge-score``, with stemming as is usual for XSUM. Loaded when it is needed."""

from __future__ import annotations

from functools import cache
from typing import Any

__all__ = ["overlap", "require", "rouge"]

TYPES = ("rouge1", "rouge2", "rougeL")


def require() -> None:
    """Fail now rather than after minutes of generating.

    Raises:
        ModuleNotFoundError: rouge-score is not installed.
    """
    _scorer(TYPES)


def rouge(reference: str, text: str) -> dict[str, float]:
    """F-measures of ROUGE-1, -2 and -L in percent."""
    scores = _scorer(TYPES).score(reference, text)
    return {name: 100 * scores[name].fmeasure for name in TYPES}


def overlap(reference: str, text: str) -> float:
    """F-measure of the words both have, 0..1 (ROUGE-1)."""
    return float(_scorer(TYPES[:1]).score(reference, text)["rouge1"].fmeasure)


@cache
def _scorer(types: tuple[str, ...]) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the measures xsum and long need rouge-score: pip install 'h2o-vllm[loadtest]'"
        ) from error
    return RougeScorer(list(types), use_stemmer=True)
