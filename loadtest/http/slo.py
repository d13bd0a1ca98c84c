# SPDX-License-Identifier: Apache-2.0
"""Service level objectives: what is written, and whether a run met it. Pure.

``ttft_p99=2.0,itl_p95[kv=0.2]=0.05,tok_per_s=100,error_rate=0`` - a metric, its statistic, optionally one
budget's requests, and the limit. Times are seconds and must not exceed the limit; ``tok_per_s`` and
``req_per_s`` must not fall below it. An objective without a measurement is not met.
"""

import math
import re
import statistics
from dataclasses import dataclass

from loadtest.common.statistics import percentile
from loadtest.http.records import ALL, Summary

SAMPLED = ("ttft", "itl", "tpot", "latency")
AT_LEAST = ("tok_per_s", "req_per_s")
COUNTED = (*AT_LEAST, "error_rate")

_ENTRY = re.compile(
    rf"(?:(?P<metric>{'|'.join(SAMPLED)})_(?P<stat>p\d+(?:\.\d+)?|mean|max)"
    rf"|(?P<counted>{'|'.join(COUNTED)}))"
    r"(?:\[(?P<label>[^\]]+)\])?=(?P<limit>\d+(?:\.\d+)?)"
)


class SLOError(ValueError):
    """An objective that cannot be read."""


@dataclass(frozen=True)
class Objective:
    """One limit.

    Attributes:
        metric: one of ``SAMPLED`` or ``COUNTED``.
        stat: ``p99``, ``mean``, ``max``; empty for counted metrics.
        label: of which requests, ``kv=0.2``; ``all`` for all of them.
    """

    metric: str
    stat: str
    label: str
    limit: float

    def __str__(self) -> str:
        group = "" if self.label == ALL else f"[{self.label}]"
        sign = ">=" if self.metric in AT_LEAST else "<="
        return f"{self.metric}{'_' if self.stat else ''}{self.stat}{group} {sign} {self.limit:g}"


@dataclass(frozen=True)
class SLOResult:
    """An objective, what was measured (NaN: nothing), and whether that is enough."""

    objective: Objective
    measured: float
    met: bool


def parse_slo(text: str) -> tuple[Objective, ...]:
    """The objectives in ``text``, none if it is empty.

    Raises:
        SLOError: naming the entry that cannot be read.
    """
    return tuple(_objective(entry.strip()) for entry in text.split(",") if entry.strip())


def check(objectives: tuple[Objective, ...], summaries: dict[str, Summary]) -> list[SLOResult]:
    """Each objective against the figures of a run."""
    results = []
    for objective in objectives:
        got = _measured(objective, summaries.get(objective.label))
        more = objective.metric in AT_LEAST
        # NaN compares false either way: what was not measured was not met.
        met = got >= objective.limit if more else got <= objective.limit
        results.append(SLOResult(objective, got, met))
    return results


def _objective(entry: str) -> Objective:
    found = _ENTRY.fullmatch(entry)
    if found is None or _share(found["stat"]) > 1:
        raise SLOError(
            f"--slo: got {entry!r}, wanted METRIC=LIMIT or METRIC[kv=BUDGET]=LIMIT with METRIC one of "
            f"{', '.join(f'{name}_pNN' for name in SAMPLED)} (or _mean, _max), {', '.join(COUNTED)}"
        )
    return Objective(
        found["metric"] or found["counted"],
        found["stat"] or "",
        found["label"] or ALL,
        float(found["limit"]),
    )


def _share(stat: str | None) -> float:
    return float(stat[1:]) / 100 if stat and stat.startswith("p") else 0.0


def _measured(objective: Objective, summary: Summary | None) -> float:
    if summary is None or summary.requests == summary.cut:
        return math.nan
    if objective.metric in COUNTED:
        return float(getattr(summary, objective.metric))
    values = summary.samples[objective.metric]
    if objective.stat == "mean":
        return statistics.fmean(values) if values else math.nan
    if objective.stat == "max":
        return max(values, default=math.nan)
    return percentile(values, _share(objective.stat))
