# SPDX-License-Identifier: Apache-2.0
"""How far the next-token distribution drifts from full KV's on the same prefix: KL divergence, agreement.

Judges the answers of :mod:`~loadtest.quality.measures.nll`, where every policy reads the same tokens. An
engine reports the most likely tokens of each place, not all: the divergence is that of the two distributions
over the tokens both report, each by itself, and all the others put together. Putting outcomes together never
raises a KL divergence, so this is a lower bound of the true one.
"""

from __future__ import annotations

import math
from typing import ClassVar

from typing_extensions import override

from loadtest.quality.generation import TOP, GenerationOutput, Model
from loadtest.quality.measures.base import Measure, Metric, Sample
from loadtest.quality.measures.nll import forced_samples, in_bins
from loadtest.quality.sizes import Sizes

__all__ = ["Drift", "agree", "divergence"]

TINY = 1e-9
"""Below it a remainder is rounding."""


def divergence(full: dict[int, float], other: dict[int, float]) -> float:
    """KL(full || other) in nats of two partly known distributions: token -> log-probability."""
    known = full.keys() & other.keys()
    total = math.fsum(math.exp(full[token]) * (full[token] - other[token]) for token in known)
    rest = max(TINY, 1.0 - math.fsum(math.exp(full[token]) for token in known))
    other_rest = max(TINY, 1.0 - math.fsum(math.exp(other[token]) for token in known))
    return max(0.0, total + rest * math.log(rest / other_rest))


def agree(full: dict[int, float], other: dict[int, float]) -> bool:
    """Whether both find the same token most likely. In bfloat16 several may be: one in common will do."""
    return bool(_most_likely(full) & _most_likely(other))


def _most_likely(step: dict[int, float]) -> set[int]:
    top = max(step.values())
    return {token for token, value in step.items() if value == top}


class Drift(Measure):
    """How far the distribution is from full KV's."""

    name = "drift"
    generation = "forced"
    forces = True
    metrics: ClassVar = (
        Metric(
            "kl",
            f"KL(full KV || policy), nats per token (lower bound: top {TOP} and the rest)",
            better="low",
            digits=3,
            pictured=True,
        ),
        Metric(
            "agree",
            "same most likely token as full KV, %",
            better="high",
            scale=100,
            pictured=True,
        ),
    )

    @override
    def samples(self, model: Model, sizes: Sizes) -> list[Sample]:
        return forced_samples(model, sizes)

    @override
    def values(
        self, sample: Sample, answer: GenerationOutput, full: GenerationOutput
    ) -> dict[str, float]:
        pairs = list(zip(full.steps, answer.steps, strict=True))
        kl = in_bins("kl", [divergence(*pair) for pair in pairs])
        return {**kl, **in_bins("agree", [float(agree(*pair)) for pair in pairs])}
