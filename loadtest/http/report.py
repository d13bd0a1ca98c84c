# SPDX-License-Identifier: Apache-2.0
"""The report of load test files, as Markdown.

    python -m loadtest.http.report RUN.jsonl [--slo OBJECTIVES] [--out DIRECTORY]

Writes ``RUN.md``. With ``--slo`` the exit code is 3 if an objective is not met. A file of one
run gives a row per budget, a file of a comparison a row per variant: medians over its rounds.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.common.statistics import percentile
from loadtest.common.tables import markdown_table, median_range, number
from loadtest.http.options import LoadSettings
from loadtest.http.records import (
    ALL,
    Record,
    Run,
    Summary,
    pooled,
    read_runs,
    runs_by_variant,
    summarise,
)
from loadtest.http.slo import SLOError, SLOResult, check, parse_slo

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
    parser.add_argument(
        "file", type=Path, help="JSONL file that --jsonl or loadtest.http.compare wrote"
    )
    parser.add_argument("--slo", default="", help="objectives, such as ttft_p99=2.0")
    parser.add_argument(
        "--out", type=Path, help="folder for the report (default: that of the file)"
    )
    args = parser.parse_args(argv)
    try:
        objectives, runs = parse_slo(args.slo), read_runs(args.file)
    except (OSError, ValueError, SLOError) as error:
        parser.error(str(error))
    if not any(run.records for run in runs):
        parser.error(f"{args.file}: no requests in it")
    results = check(objectives, summarise(pooled(runs)))
    write_report(runs, results, (args.out or args.file.parent) / args.file.name)
    return 0 if all(result.met for result in results) else SLO_EXIT_CODE


def write_report(runs: Sequence[Run], results: Sequence[SLOResult], path: Path) -> str:
    """Write Markdown beside ``path``; returns the tables."""
    tables = markdown(runs, results)
    path.with_suffix(".md").write_text(f"# {path.stem}\n\n{tables}")
    print(f"report: {path.with_suffix('.md')}")
    return tables


def markdown(runs: Sequence[Run], results: Sequence[SLOResult]) -> str:
    """Tables of figures and of what the SLO gate found, and what the runs were."""
    compared = runs_by_variant(runs)
    parts = [_comparison(compared)] if compared else [_figures(run) for run in runs]
    if results:
        parts.append(_objectives(results))
    parts.append(_facts(runs[0].description))
    return "\n\n".join(parts) + "\n"


def _figures(run: Run) -> str:
    rows = []
    for label, summary in summarise(run.records).items():
        cells = [
            str(summary.requests), str(summary.failures), str(summary.cut),
            str(summary.output_tokens), number(summary.tok_per_s, 1), _pair(summary, "ttft"),
            _pair(summary, "itl", 1000), number(1000 * _p(summary, "tpot", 0.5), 1),
            _pair(summary, "latency"), _share(summary.held),
        ]  # fmt: skip
        rows.append([label, *cells])
    return markdown_table(["", *COLUMNS], rows)


def _comparison(compared: dict[str, list[Run]]) -> str:
    base = next(iter(compared.values()))
    first = {run.description.get("round"): _whole(run.records).tok_per_s for run in base}
    rows = []
    for name, runs in compared.items():
        speeds = {run.description.get("round"): _whole(run.records).tok_per_s for run in runs}
        ratios = [speed / first[turn] for turn, speed in speeds.items() if first.get(turn)]
        servers = [run.description.get("server", {}) for run in runs]
        both = _whole(pooled(runs))
        cells = [
            str(len(runs)), median_range(list(speeds.values()), 1),
            "" if runs is base else f"**{median_range(ratios, 2)}**",
            _pair(both, "ttft"), _pair(both, "itl", 1000), _share(both.held),
            number(_median(servers, "running_mean"), 1), number(_median(servers, "preemptions"), 0),
            str(both.failures),
        ]  # fmt: skip
        rows.append([name, *cells])
    return markdown_table(["", *COMPARED], rows)


def _whole(records: Sequence[Record]) -> Summary:
    return summarise(records)[ALL]


def _objectives(results: Sequence[SLOResult]) -> str:
    rows = [
        [str(one.objective), number(one.measured, 4), "met" if one.met else "**not met**"]
        for one in results
    ]
    return markdown_table(["objective", "measured", ""], rows)


def _facts(description: dict[str, Any]) -> str:
    versions = description.get("versions", {})
    facts = {
        "model": description.get("model"),
        "command": description.get("command") and f"`{description['command']}`",
        "server": description.get("server_command") and f"`{description['server_command']}`",
        "vLLM of the server": description.get("server_version"),
        "load": _load(description),
        "machine": description.get("machine"),
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
        "commit": description.get("commit"),
        "date": description.get("date"),
    }
    return "\n".join(f"* {name}: {fact}" for name, fact in facts.items() if fact)


def _load(description: dict[str, Any]) -> str:
    """The settings that are not what they are by default."""
    usual = LoadSettings().public()
    usual |= dict.fromkeys(ALWAYS, object())
    # In a comparison these are each run's own.
    own = ("budgets", "salt", "cache_salt") if "variant" in description else ()
    return ", ".join(
        f"{name} {value}"
        for name, value in description.get("settings", {}).items()
        if value not in ("", None) and value != usual.get(name) and name not in own
    )


def _p(summary: Summary, metric: str, share: float) -> float:
    return percentile(summary.samples[metric], share)


def _pair(summary: Summary, metric: str, scale: float = 1) -> str:
    digits = 1 if scale > 1 else 2
    return " / ".join(number(scale * _p(summary, metric, share), digits) for share in (0.5, 0.99))


def _median(rows: Sequence[dict[str, Any]], key: str) -> float:
    values = [row[key] for row in rows if key in row]
    return statistics.median(values) if values else math.nan


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


if __name__ == "__main__":
    raise SystemExit(main())
