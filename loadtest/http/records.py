# SPDX-License-Identifier: Apache-2.0
"""Rows of a load test, their file, and exact figures of them. Pure but for reading and writing files.

A file is JSON lines: one ``{"kind": "run", ...}`` with what the numbers have to be read with, then one
``{"kind": "request", ...}`` per request; several runs may follow each other. Locust rounds what it keeps
(100 ms at one second), hence this file: percentiles of the report and of the SLO gate are computed from
every single measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from loadtest.common.results import append_rows, numbered_rows


@dataclass
class Record:
    """One request. Times are seconds since the run began, durations are seconds.

    Attributes:
        label: the budget's, ``kv=0.2``.
        at: when it was due; an open-loop request is late if the generator is.
        late: how much later than ``at`` it was sent.
        ttft, latency: from ``at`` to the first token, and to the end.
        gaps_ms: milliseconds between token events.
        output_tokens: from ``usage``; token events if the stream broke off before that.
        cut: whether the end of the run cut it off; then it is neither a success nor a failure.
        id: sent as ``X-Request-Id``: servers and routers call the request by it.
        server: version of the ``h2o-serve`` that answered, by its header; empty: it was none.
    """

    label: str
    at: float
    late: float = 0.0
    ttft: float | None = None
    latency: float | None = None
    gaps_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: str | None = None
    kv_cache: dict[str, Any] | None = None
    error: str | None = None
    cut: bool = False
    id: str = ""
    server: str = ""

    @property
    def whole(self) -> bool:
        """Whether it was answered to the end."""
        return self.error is None and not self.cut

    @property
    def end(self) -> float:
        """When its last token came."""
        return self.at + (self.latency or 0.0)

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first."""
        if not self.whole or self.ttft is None or self.latency is None or self.output_tokens < 2:
            return None
        return sum(self.gaps_ms) / 1000 / (self.output_tokens - 1)

    @property
    def tok_per_s(self) -> float | None:
        """Output tokens per second of this request, its wait for the first one included."""
        return self.output_tokens / self.latency if self.whole and self.latency else None

    def row(self) -> dict[str, Any]:
        """As it is written: times to 0.1 ms."""
        values = dataclasses.asdict(self)
        for key in ("at", "late", "ttft", "latency"):
            if values[key] is not None:
                values[key] = round(values[key], 4)
        values["gaps_ms"] = [round(gap, 1) for gap in self.gaps_ms]
        return {"kind": "request", **values}

    @classmethod
    def of(cls, row: dict[str, Any]) -> Record:
        """The inverse of :meth:`row`; fields that are gone are left out."""
        known = {one.name for one in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in row.items() if key in known})


@dataclass
class Run:
    """One run: what it was, and its requests."""

    description: dict[str, Any]
    records: list[Record]


@dataclass(frozen=True)
class Summary:
    """Figures of a group of requests.

    Attributes:
        samples: ``ttft``, ``itl``, ``tpot``, ``latency`` in seconds, ``tok_per_s_request``: every value.
        seconds: from the first request of the whole run to its last token.
        tok_per_s: output tokens of the group per second of the run.
        held: KV tokens held at the end over tokens seen, by the server's reports.
        lossless: share of the reports that say that nothing was evicted.
    """

    requests: int
    failures: int
    cut: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    held: float | None
    lossless: float | None
    samples: dict[str, list[float]]

    @property
    def tok_per_s(self) -> float:
        """Output tokens of the group per second of the run."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def req_per_s(self) -> float:
        """Answered requests per second of the run."""
        whole = self.requests - self.failures - self.cut
        return whole / self.seconds if self.seconds else 0.0

    @property
    def error_rate(self) -> float:
        """Failures among the requests that ended."""
        ended = self.requests - self.cut
        return self.failures / ended if ended else 0.0


ALL = "all"
"""Label of the group of all requests."""


def summarise(records: Sequence[Record]) -> dict[str, Summary]:
    """One summary for all requests, then one for each label."""
    begin = min((record.at for record in records), default=0.0)
    seconds = max((record.end for record in records), default=0.0) - begin
    groups: dict[str, list[Record]] = {ALL: list(records)}
    for record in records:
        groups.setdefault(record.label, []).append(record)
    return {label: _summary(group, seconds) for label, group in groups.items()}


def _summary(group: list[Record], seconds: float) -> Summary:
    whole = [record for record in group if record.whole]
    reports = [record.kv_cache for record in whole if record.kv_cache]
    seen = sum(report["tokens_seen"] for report in reports)
    return Summary(
        requests=len(group),
        failures=sum(record.error is not None for record in group),
        cut=sum(record.cut for record in group),
        seconds=seconds,
        prompt_tokens=sum(record.prompt_tokens for record in group),
        output_tokens=sum(record.output_tokens for record in group),
        held=sum(report["tokens_held"] for report in reports) / seen if seen else None,
        lossless=fmean(report["tokens_held"] == report["tokens_seen"] for report in reports)
        if reports
        else None,
        samples={
            "ttft": _present(record.ttft for record in whole),
            "itl": [gap / 1000 for record in whole for gap in record.gaps_ms],
            "tpot": _present(record.tpot for record in whole),
            "latency": _present(record.latency for record in whole),
            "tok_per_s_request": _present(record.tok_per_s for record in whole),
        },
    )


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def write_runs(path: Path, runs: Iterable[Run]) -> None:
    """Append ``runs`` to ``path``, making its directory."""
    for run in runs:
        rows = (record.row() for record in run.records)
        append_rows(path, [{"kind": "run", **run.description}, *rows])


def read_runs(path: Path) -> list[Run]:
    """The runs in ``path``.

    Raises:
        ValueError: a line is neither a run nor a request of one.
    """
    runs: list[Run] = []
    for number, row in numbered_rows(path):
        if row.get("kind") == "run":
            runs.append(Run({key: value for key, value in row.items() if key != "kind"}, []))
        elif row.get("kind") == "request" and runs:
            runs[-1].records.append(Record.of(row))
        else:
            raise ValueError(f"{path}:{number}: neither a run nor a request of one")
    return runs


def runs_by_variant(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of a comparison by variant, in the order they first come in; nothing if it is none."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if "variant" in run.description:
            found.setdefault(run.description["variant"], []).append(run)
    return found


def pooled(runs: Iterable[Run]) -> list[Record]:
    """The requests of all runs."""
    return [record for run in runs for record in run.records]
