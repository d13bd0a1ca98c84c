# SPDX-License-Identifier: Apache-2.0
"""How long prompts and answers are: distributions that are drawn from by uniform numbers. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

__all__ = ["Fixed", "Lengths", "Lognormal", "Pairs", "Quantiles", "TrafficError", "read_pairs"]


class TrafficError(ValueError):
    """Traffic that cannot be read."""


class Lengths(Protocol):
    """Numbers of tokens."""

    def at(self, share: float) -> float:
        """The quantile of ``share``, in (0, 1)."""


@dataclass(frozen=True)
class Fixed:
    """Even in a tenth (``spread``) up and down, as :mod:`loadtest.engine.workloads` has it."""

    tokens: int
    spread: float = 0.1

    def at(self, share: float) -> float:
        """See :class:`Lengths`."""
        return self.tokens * (1 + self.spread * (2 * share - 1))


@dataclass(frozen=True)
class Lognormal:
    """By its mean and the standard deviation of its logarithm; the median is ``mean / exp(sigma**2 / 2)``."""

    mean: float
    sigma: float

    def at(self, share: float) -> float:
        """See :class:`Lengths`."""
        return self.mean * math.exp(self.sigma * (NormalDist().inv_cdf(share) - self.sigma / 2))


SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True)
class Quantiles:
    """By the lengths at :data:`SHARES`, evenly on a logarithmic scale between them, cut off beyond."""

    tokens: tuple[int, ...]

    def at(self, share: float) -> float:
        """See :class:`Lengths`."""
        if share <= SHARES[0]:
            return self.tokens[0]
        for low, high, less, more in zip(
            SHARES, SHARES[1:], self.tokens, self.tokens[1:], strict=False
        ):
            if share <= high:
                return less * (more / less) ** ((share - low) / (high - low))
        return self.tokens[-1]


@dataclass(frozen=True)
class Pairs:
    """Prompts and answers that belong together, as somebody's own log has them."""

    pairs: Sequence[tuple[int, int]]

    def at(self, share: float) -> tuple[int, int]:
        """One of them, each as likely as the others."""
        return self.pairs[int(share * len(self.pairs))]


def read_pairs(path: Path) -> Pairs:
    """JSON lines with ``prompt_tokens`` and ``output_tokens``; other keys are passed over.

    Raises:
        TrafficError: a line has none, or one below 1; or there is no line.
    """
    pairs = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise TrafficError(f"--traffic: cannot read {path}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            pair = row["prompt_tokens"], row["output_tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise TrafficError(
                f"--traffic: {path}:{number}: wanted an object with prompt_tokens and output_tokens"
            ) from error
        if not all(isinstance(tokens, int) and tokens >= 1 for tokens in pair):
            raise TrafficError(f"--traffic: {path}:{number}: got {pair}, wanted integers from 1")
        pairs.append(pair)
    if not pairs:
        raise TrafficError(f"--traffic: {path} has no lines")
    return Pairs(pairs)
