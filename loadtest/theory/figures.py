# SPDX-License-Identifier: Apache-2.0
"""Rows to numbers: a head's figure is its mean over texts, and what is shown is the spread over heads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from loadtest.common.results import Row
from loadtest.common.tables import pick

__all__ = ["by_head", "by_query", "cases", "spread", "texts_of"]


def by_head(rows: Iterable[Row], key: str, **wanted: object) -> NDArray[np.float64]:
    """``key`` of every layer and head, [L, KH], of the rows that have these values."""
    layers: dict[int, list[list[float]]] = {}
    for row in pick(rows, **wanted):
        layers.setdefault(row["layer"], []).append(row["values"][key])
    means: NDArray[np.float64] = np.array([np.mean(layers[n], axis=0) for n in sorted(layers)])
    return means


def by_query(rows: Iterable[Row], key: str, **wanted: object) -> NDArray[np.float64]:
    """``key`` of every text, layer, head and query, in a row."""
    return np.concatenate([np.ravel(row["values"][key]) for row in pick(rows, **wanted)])


def spread(values: NDArray[np.float64], style: str) -> str:
    """``2.1 (1.4 to 2.9)`` of ``{:.1f}``: the median over heads, the least and the most."""
    middle, low, high = (style.format(f(values)) for f in (np.median, np.min, np.max))
    return f"{middle} ({low} to {high})"


def cases(rows: Iterable[Row], measure: str) -> list[tuple[str, float | None]]:
    """Cases and budgets that were measured, in order."""
    return list(dict.fromkeys((row["case"], row["budget"]) for row in pick(rows, measure=measure)))


def texts_of(rows: Iterable[Row]) -> list[str]:
    """Names, in order."""
    return list(dict.fromkeys(row["text"] for row in rows))
