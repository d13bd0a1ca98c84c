# SPDX-License-Identifier: Apache-2.0
"""What a fleet is asked: how long texts are and when they come. Pure.

Arrivals are a renewal process: gaps are independent, exponential (Poisson) or, with a coefficient of
variation ``cv`` above 1, gamma, which comes in bursts. What one of many replicas sees of it follows
exactly, so that a fleet of any size is simulated by a few: with round robin a replica gets every ``n``-th
request, at random each with probability ``1 / n``; sums of so many gamma gaps are gamma again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.plan.lengths import (
    Fixed,
    Lengths,
    Lognormal,
    Pairs,
    Quantiles,
    TrafficError,
    read_pairs,
)

__all__ = ["TRAFFIC", "Text", "Traffic", "arrivals", "load_traffic"]


@dataclass(frozen=True)
class Text:
    """Tokens of a prompt and of its answer."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Traffic:
    """Lengths, burstiness and where they come from.

    Attributes:
        lengths: of prompts and of answers, independent of each other, or pairs.
        cv: standard deviation of the gaps between arrivals over their mean; 1: Poisson.
        about: source, and what is assumed.
    """

    name: str
    lengths: tuple[Lengths, Lengths] | Pairs
    cv: float
    about: str

    def texts(self, count: int, longest: int, seed: int, replica: int = 0) -> list[Text]:
        """The first ``count`` texts; what exceeds ``longest`` loses the beginning of its prompt."""
        shares = np.random.default_rng((seed, replica, 0)).random((count, 2)).tolist()
        return [self._text(first, second, longest) for first, second in shares]

    def _text(self, first: float, second: float, longest: int) -> Text:
        if isinstance(self.lengths, Pairs):
            prompt, output = self.lengths.at(first)
        else:
            prompt, output = (
                max(1, round(lengths.at(share)))
                for lengths, share in zip(self.lengths, (first, second), strict=True)
            )
        output = min(output, longest - 1)
        return Text(min(prompt, longest - output), output)


def arrivals(
    rate: float, cv: float, *, replicas: int, routing: str, seed: int, replica: int = 0
) -> Iterator[float]:
    """Seconds at which one of ``replicas`` gets a request, ``rate`` per second for all.

    Args:
        routing: ``round-robin`` or ``random``.
        replica: which one; each has random numbers of its own.
    """
    source = np.random.default_rng((seed, replica, 1))
    shape = 1 / cv**2
    now = 0.0
    while True:
        gaps = replicas if routing == "round-robin" else int(source.geometric(1 / replicas))
        now += float(source.gamma(gaps * shape, 1 / (shape * rate)))
        yield now


_AZURE = (
    "Azure LLM inference trace 2023, {}: quantiles of the published rows (CC-BY; Patel et al., Splitwise, "
    "ISCA 2024), prompts and answers independent (correlation of their logarithms {}), Poisson arrivals "
    "(measured cv of the gaps {})"
)
_BURST_GPT = (
    "BurstGPT (Wang et al., KDD 2025): mean lengths 621 and 126 tokens, taken from others who replay it and "
    "not computed from the trace; assumed lognormal of sigma 1, independent; gamma arrivals of cv 2, the "
    "shape 0.25 of its authors' generator"
)

TRAFFIC = {
    traffic.name: traffic
    for traffic in (
        Traffic(
            "azure-conversation",
            (Quantiles((29, 207, 396, 1020, 1189, 2734, 4083, 4142, 6179)),
             Quantiles((16, 54, 85, 129, 395, 424, 451, 601, 954))),
            1.0,
            _AZURE.format("conversation", "0.09", "1.09"),
        ),
        Traffic(
            "azure-code",
            (Quantiles((17, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437)),
             Quantiles((6, 7, 9, 13, 24, 55, 90, 251, 825))),
            1.0,
            _AZURE.format("code", "0.00", "13, with pauses of minutes"),
        ),
        Traffic("burstgpt", (Lognormal(621, 1.0), Lognormal(126, 1.0)), 2.0, _BURST_GPT),
    )
}  # fmt: skip
"""By name, as ``--traffic`` takes it."""


def load_traffic(text: str) -> Traffic:
    """One of :data:`TRAFFIC`, ``PROMPT+OUTPUT`` tokens, or a file of JSON lines.

    Raises:
        TrafficError: it is none of them.
    """
    if text in TRAFFIC:
        return TRAFFIC[text]
    prompt, plus, output = text.partition("+")
    if plus and prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output):
        lengths = (Fixed(int(prompt)), Fixed(int(output), spread=0.0))
        return Traffic(text, lengths, 1.0, "prompts even in 10 % up and down, Poisson arrivals")
    if text.endswith(".jsonl"):
        pairs = read_pairs(Path(text))
        return Traffic(Path(text).name, pairs, 1.0, "drawn from a log, Poisson arrivals")
    raise TrafficError(
        f"--traffic: got {text!r}, wanted {', '.join(TRAFFIC)}, PROMPT+OUTPUT tokens such as 1000+512, or a "
        "file of JSON lines (*.jsonl)"
    )
