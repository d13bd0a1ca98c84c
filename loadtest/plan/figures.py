# SPDX-License-Identifier: Apache-2.0
"""What a simulation says: figures of its requests and of its steps, once it has warmed up. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from loadtest.common.statistics import percentile
from loadtest.plan.fleet import Served
from loadtest.plan.replica import Job, Step

__all__ = ["SHARES", "WARM_UP", "Figures", "dollars_per_million", "figures_of"]

SHARES = (50, 90, 99)
"""Percentiles that are kept of latencies."""

WARM_UP = 0.3
"""Share of the requests, the first ones, that no figure is of: they find an engine that is not busy yet."""


@dataclass(frozen=True)
class Figures:
    """Of one replica, the mean of those that were simulated.

    Attributes:
        running: requests at a time, over time.
        tok_per_s: generated tokens, from the end of the warm-up to the last arrival.
        asked_tok_per_s: tokens that the requests which came meanwhile want; more, if the engine falls behind.
        first_token_s, per_token_s: percentiles by name, ``p50``; the latter of each request's mean after its
            first token.
        usage: share of the pool that is in use, over time.
        preemptions: per 1,000 requests.
        lossless: share of the answers that nothing was evicted from.
    """

    requests: int
    running: float
    tok_per_s: float
    asked_tok_per_s: float
    first_token_s: dict[str, float]
    per_token_s: dict[str, float]
    usage: float
    preemptions: float
    lossless: float

    def row(self) -> dict[str, Any]:
        """For a file of results."""
        return asdict(self)


def figures_of(served: Served, warm_up: float = WARM_UP) -> Figures:
    """Figures of what was served; ``warm_up`` 0 counts everything, to the last token."""
    measured: list[Job] = []
    spans = []
    for replica, jobs in zip(served.replicas, served.jobs, strict=True):
        skipped = int(warm_up * len(jobs))
        measured += jobs[skipped:]
        if jobs:
            begin = jobs[skipped].at
            end = jobs[-1].at if warm_up else replica.now
            asked = sum(job.output_tokens for job in jobs[skipped:])
            spans.append(_Span(begin, max(end, begin), replica.steps, asked))
    answers = [job for job in measured if job.output_tokens > 1]
    return Figures(
        requests=len(measured),
        running=fmean(span.mean([step.running for step in span.steps]) for span in spans),
        tok_per_s=fmean(span.per_second(sum(step.tokens for step in span.steps)) for span in spans),
        asked_tok_per_s=fmean(span.per_second(span.asked) for span in spans),
        first_token_s=percentiles([job.first - job.at for job in measured]),
        per_token_s=percentiles(
            [(job.end - job.first) / (job.output_tokens - 1) for job in answers]
        ),
        usage=fmean(span.mean([step.usage for step in span.steps]) for span in spans),
        preemptions=1000 * fmean(job.preemptions for job in measured),
        lossless=fmean(job.lossless for job in measured),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """What rows keep of a latency."""
    return {f"p{share}": percentile(values, share / 100) for share in SHARES}


def dollars_per_million(gpus: int, dollars_per_hour: float, tok_per_s: float) -> float:
    """Of a million generated tokens, if so many GPUs together generate ``tok_per_s``."""
    return gpus * dollars_per_hour / 3600 / tok_per_s * 1e6 if tok_per_s else math.inf


@dataclass(frozen=True)
class _Span:
    begin: float
    end: float
    all_steps: Sequence[Step]
    asked: int

    @property
    def steps(self) -> list[Step]:
        """Those that ended in it."""
        return [step for step in self.all_steps if self.begin < step.end <= self.end]

    def per_second(self, tokens: float) -> float:
        seconds = self.end - self.begin
        return tokens / seconds if seconds else 0.0

    def mean(self, values: Sequence[float]) -> float:
        """Over the time of the span, in parts of which the engine may idle."""
        steps = self.steps
        return self.per_second(
            sum(value * step.seconds for value, step in zip(values, steps, strict=True))
        )
