# SPDX-License-Identifier: Apache-2.0
"""The report of load test files, as Markdown and PNG.

    python -m loadtest.http.report RUN.jsonl [--slo OBJECTIVES] [--out DIRECTORY]

Writes ``RUN.md`` and ``RUN.png``. With ``--slo`` the exit code is 3 if an objective is not met. A file of one
run gives a row per budget, a file of a comparison a row per variant: medians over its rounds.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.common.settings import public
from loadtest.http.options import LoadSettings
from loadtest.http.records import ALL, Run, Summary, percentile, read_runs, summarise
from loadtest.http.slo import SLOError, SLOResult, check, parse_slo

__all__ = ["markdown", "variants"]

SLO_EXIT_CODE = 3

COLUMNS = (
    "requests", "failed", "cut", "output tokens", "tok/s", "TTFT p50 / p99 s", "ITL p50 / p99 ms",
    "TPOT p50 ms", "latency p50 / p99 s", "KV held",
)  # fmt: skip
ALWAYS = ("endpoint", "budgets", "arrival", "prompt_tokens", "output_tokens")
"""Settings that are shown even where they have their default value."""
COMPARED = (
    "rounds", "tok/s", "against the first", "TTFT p50 / p99 s", "ITL p50 / p99 ms", "KV held",
    "running", "preempted", "failed",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.http.report", description="Report of load test files."
    )
    parser.add_argument("file", type=Path, help="what --jsonl or loadtest.http.compare wrote")
    parser.add_argument("--slo", default="", help="objectives to judge a run by")
    parser.add_argument("--out", type=Path, help="directory; default: beside the file")
    args = parser.parse_args(argv)
    try:
        objectives, runs = parse_slo(args.slo), read_runs(args.file)
    except (OSError, ValueError, SLOError) as error:
        parser.error(str(error))
    if not any(run.records for run in runs):
        parser.error(f"{args.file}: no requests in it")
    verdicts = check(objectives, summarise([record for run in runs for record in run.records]))
    out = (args.out or args.file.parent) / args.file.name
    from loadtest.http.pictures import picture

    image = picture(runs, out.with_suffix(".png"))
    text = f"# {out.stem}\n\n![tokens per second and latencies]({image.name})\n\n{markdown(runs, verdicts)}"
    out.with_suffix(".md").write_text(text)
    print(f"report: {out.with_suffix('.md')}, {image}")
    return 0 if all(verdict.met for verdict in verdicts) else SLO_EXIT_CODE


def variants(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of a comparison by variant, in the order they first come in; nothing if it is none."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if "variant" in run.about:
            found.setdefault(run.about["variant"], []).append(run)
    return found


def markdown(runs: Sequence[Run], verdicts: Sequence[SLOResult]) -> str:
    """Tables of figures and verdicts, and what the runs were."""
    compared = variants(runs)
    parts = [_comparison(compared)] if compared else [_figures(run) for run in runs]
    if verdicts:
        parts.append(_verdicts(verdicts))
    parts.append(_about(runs[0].about))
    return "\n\n".join(parts) + "\n"


def _figures(run: Run) -> str:
    rows = []
    for label, summary in summarise(run.records).items():
        cells = [
            str(summary.requests), str(summary.failures), str(summary.cut),
            str(summary.output_tokens), _number(summary.tok_per_s, 1), _pair(summary, "ttft"),
            _pair(summary, "itl", 1000), _number(1000 * _p(summary, "tpot", 0.5), 1),
            _pair(summary, "latency"), _share(summary.held),
        ]  # fmt: skip
        rows.append([label, *cells])
    return _table(["", *COLUMNS], rows)


def _comparison(compared: dict[str, list[Run]]) -> str:
    base = next(iter(compared.values()))
    speeds = {name: [_whole(run).tok_per_s for run in runs] for name, runs in compared.items()}
    first = {run.about.get("round"): _whole(run).tok_per_s for run in base}
    rows = []
    for name, runs in compared.items():
        pooled = _whole(Run({}, [record for run in runs for record in run.records]))
        ratios = [
            _whole(run).tok_per_s / first[run.about.get("round")]
            for run in runs
            if first.get(run.about.get("round"))
        ]
        server = [run.about.get("server", {}) for run in runs]
        cells = [
            str(len(runs)), _spread(speeds[name], 1),
            "" if runs is base else f"**{_spread(ratios, 2)}**",
            _pair(pooled, "ttft"), _pair(pooled, "itl", 1000), _share(pooled.held),
            _number(_median(server, "running_mean"), 1), _number(_median(server, "preemptions"), 0),
            str(pooled.failures),
        ]  # fmt: skip
        rows.append([name, *cells])
    return _table(["", *COMPARED], rows)


def _whole(run: Run) -> Summary:
    return summarise(run.records)[ALL]


def _verdicts(verdicts: Sequence[SLOResult]) -> str:
    rows = [
        [str(one.objective), _number(one.measured, 4), "met" if one.met else "**not met**"]
        for one in verdicts
    ]
    return _table(["objective", "measured", ""], rows)


def _about(about: dict[str, Any]) -> str:
    usual = {**public(LoadSettings()), **dict.fromkeys(ALWAYS, object())}
    shown = ", ".join(
        f"{name} {value}"
        for name, value in about.get("settings", {}).items()
        if value not in ("", None)
        and value != usual.get(name)
        # In a comparison these are each run's own.
        and not ("variant" in about and name in ("budgets", "salt", "cache_salt"))
    )
    versions = ", ".join(f"{name} {value}" for name, value in about.get("versions", {}).items())
    facts = {
        "model": about.get("model"),
        "command": about.get("command") and f"`{about['command']}`",
        "server": about.get("server_command") and f"`{about['server_command']}`",
        "vLLM of the server": about.get("server_version"),
        "load": shown,
        "machine": about.get("machine"),
        "versions": versions,
        "commit": about.get("commit"),
        "date": about.get("date"),
    }
    return "\n".join(f"* {name}: {fact}" for name, fact in facts.items() if fact)


def _p(summary: Summary, metric: str, share: float) -> float:
    return percentile(summary.samples[metric], share)


def _pair(summary: Summary, metric: str, scale: float = 1) -> str:
    digits = 1 if scale > 1 else 2
    return " / ".join(_number(scale * _p(summary, metric, share), digits) for share in (0.5, 0.99))


def _median(rows: Sequence[dict[str, Any]], key: str) -> float:
    values = [row[key] for row in rows if key in row]
    return statistics.median(values) if values else math.nan


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    middle = _number(statistics.median(values), digits)
    if len(values) == 1:
        return middle
    return f"{middle} ({_number(min(values), digits)}-{_number(max(values), digits)})"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
