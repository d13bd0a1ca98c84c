# SPDX-License-Identifier: Apache-2.0
"""Throughput of h2o_vllm against stock vLLM: same prompts, same run, alternating processes.

    python -m loadtest.bench [--workloads tight ample ...] [--rounds 3] [--out loadtest/results]

Each measurement is a fresh engine (warm-up excluded). Rounds alternate the variants, so that a slow
minute of the machine hits all of them; ratios are taken within a round, then their median. Writes one
JSONL row per measurement and a PNG.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from loadtest.machine import describe_run
from loadtest.workloads import RESULT_MARK, VARIANTS, WORKLOADS

COLUMNS = (
    ("tok/s", "tok_per_s", "{:.1f}"),
    ("running", "running_mean", "{:.1f}"),
    ("max", "running_max", "{:.0f}"),
    ("preempt.", "preemptions", "{:.0f}"),
    ("blocks mean", "blocks_mean", "{:.0f}"),
    ("peak", "blocks_peak", "{:.0f}"),
    ("TTFT p50 s", "ttft_s.p50", "{:.2f}"),
    ("p99", "ttft_s.p99", "{:.2f}"),
    ("ITL p50 ms", "itl_s.p50", "{:.1f}"),
    ("p99", "itl_s.p99", "{:.1f}"),
    ("RSS MiB", "peak_rss_mib", "{:.0f}"),
)


def main() -> None:
    """Measure, print, write."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M")
    path = args.out / f"bench-cpu-{stamp}.jsonl"
    rows: list[dict[str, Any]] = []
    total = len(args.workloads) * args.rounds * len(args.variants)
    for workload in args.workloads:
        for round_number in range(args.rounds):
            for variant in args.variants:
                print(f"[{len(rows) + 1}/{total}] {workload} round {round_number + 1} {variant}")
                row = describe_run("loadtest.bench")
                row |= {"workload": workload, "round": round_number, "variant": variant}
                row |= measure(workload, variant, args.model)
                rows.append(row)
                print(f"    {row['tok_per_s']:.1f} tok/s")
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(rows))
    print(f"rows: {path}")
    from loadtest.plot import plot_bench

    print(f"plot: {plot_bench(rows, path.with_suffix('.png'))}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument(
        "--model", default=None, help="a model directory; default: the embedded one"
    )
    args = parser.parse_args()
    if args.model is None:
        from h2o_vllm.models import default_model_dir

        args.model = str(default_model_dir())
    return args


def measure(workload: str, variant: str, model: str) -> dict[str, Any]:
    """One measurement in a fresh process.

    Raises:
        SystemExit: it failed; its stderr is shown.
    """
    job = {"workload": workload, "variant": variant, "model": model}
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.bench_run"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ},
    )
    if done.returncode != 0:
        raise SystemExit(f"{workload} {variant} failed:\n{done.stderr[-6000:]}")
    # vLLM logs to stdout as well, also while it shuts down.
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(RESULT_MARK)]
    result: dict[str, Any] = json.loads(line.removeprefix(RESULT_MARK))
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """Medians per workload and variant, and ours over each baseline within a round."""
    lines = ["| workload | variant | " + " | ".join(c[0] for c in COLUMNS) + " | ours / it |"]
    lines.append("|" + "---|" * (len(COLUMNS) + 3))
    for workload in dict.fromkeys(row["workload"] for row in rows):
        ours = {r["round"]: r for r in rows if (r["workload"], r["variant"]) == (workload, "h2o")}
        for variant in dict.fromkeys(row["variant"] for row in rows):
            mine = [r for r in rows if (r["workload"], r["variant"]) == (workload, variant)]
            cells = [
                style.format(statistics.median(value(row, key) for row in mine))
                for _, key, style in COLUMNS
            ]
            ratios = sorted(
                ours[row["round"]]["tok_per_s"] / row["tok_per_s"]
                for row in mine
                if row["round"] in ours
            )
            ratio = (
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
                if ratios and variant != "h2o"
                else ""
            )
            lines.append(f"| {workload} | {variant} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def value(row: dict[str, Any], key: str) -> float:
    """``row["a"]["b"]`` for ``"a.b"``; seconds of ITL as milliseconds."""
    found: Any = row
    for part in key.split("."):
        found = found[part]
    return float(found) * (1000 if key.startswith("itl_s") else 1)


if __name__ == "__main__":
    main()
