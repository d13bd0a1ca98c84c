# SPDX-License-Identifier: Apache-2.0
"""Throughput on a GPU, ours against stock vLLM's defaults. Also ``loadtest.engine.bench --device cuda``.

    python -m loadtest.engine.bench_cuda [--shape 8b] [--workloads 2k-tight ...] [--rounds 3] [--out FOLDER]

One process per engine; it serves all asked workloads of one pool size in turn. Rounds alternate the
variants, ratios are taken within a round. Appends one JSONL row per measurement as soon as it is made, so
that a run which is cut off has what it measured; ``--resume FILE`` goes on with the rest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from loadtest.common.child import Child
from loadtest.common.machine import describe_run
from loadtest.engine.tables import decode_ms
from loadtest.engine.workloads_cuda import CUDA_VARIANTS, CUDA_WORKLOADS, MODELS, make_model

__all__ = ["main", "ratios"]

Row = dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M")
    path = args.resume or args.out / f"bench-cuda-{stamp}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    model = make_model(args.shape, Path(tempfile.gettempdir()))
    for round_number, variant, names in planned(args, rows):
        print(f"round {round_number + 1} {variant}: {', '.join(names)}", flush=True)
        about = describe_run("loadtest.engine.bench_cuda") | gpu()
        about |= {"shape": args.shape, "round": round_number, "variant": variant}
        setting = CUDA_WORKLOADS[names[0]].setting
        first = {"setting": setting, "variant": variant, "model": str(model), "scale": args.scale}
        # One engine at a time: each may take the whole GPU.
        with Child("loadtest.engine.bench_cuda_run", first) as engine:
            for name in names:
                rows.append(about | engine.ask(name))
                print(f"    {name}: {rows[-1]['tok_per_s']:.1f} tok/s", flush=True)
                with path.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print(f"\n{ratios(rows)}\n\nrows: {path}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    names = list(CUDA_WORKLOADS)
    add("--device", choices=["cuda"], default="cuda", help="what this is for")
    add("--shape", choices=MODELS, default="8b", help="of the model of random weights")
    add("--workloads", nargs="+", choices=names, default=names, help="what to serve")
    add("--variants", nargs="+", choices=CUDA_VARIANTS, default=CUDA_VARIANTS, help="by what")
    add("--rounds", type=int, default=3, help="how often; variants alternate")
    add("--scale", type=float, default=1.0, help="multiplies all lengths and pools; to rehearse")
    add(
        "--out",
        type=Path,
        default=Path(__file__).parents[1] / "results",
        help="folder of the results",
    )
    add("--resume", type=Path, help="a JSONL file of an earlier run: measure only what it lacks")
    return parser.parse_args(argv)


def planned(args: argparse.Namespace, rows: list[Row]) -> Iterator[tuple[int, str, list[str]]]:
    """(round, variant, workloads) of each engine that is still to be started, in order."""
    there = {(row["round"], row["variant"], row["workload"]) for row in rows}
    for round_number in range(args.rounds):
        for setting in dict.fromkeys(CUDA_WORKLOADS[name].setting for name in args.workloads):
            for variant in args.variants:
                names = [
                    name
                    for name in args.workloads
                    if CUDA_WORKLOADS[name].setting == setting
                    and (round_number, variant, name) not in there
                ]
                if names:
                    yield round_number, variant, names


def gpu() -> dict[str, Any]:
    """Which GPU and driver; nothing where ``nvidia-smi`` is not."""
    fields = "name,driver_version,memory.total,clocks.max.sm"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return {"gpu": None}
    return {
        "gpu": dict(zip(fields.split(","), done.stdout.splitlines()[0].split(", "), strict=True))
    }


COLUMNS: tuple[tuple[str, Callable[[Row], float], str], ...] = (
    ("tok/s", lambda row: row["tok_per_s"], "{:.0f}"),
    ("running", lambda row: row["running_mean"], "{:.1f}"),
    ("max", lambda row: row["running_max"], "{:.0f}"),
    ("preempt.", lambda row: row["preemptions"], "{:.0f}"),
    ("decode step ms", decode_ms, "{:.2f}"),
    ("start s", lambda row: row["start_s"], "{:.0f}"),
)


def ratios(rows: list[Row]) -> str:
    """Medians per workload and variant, and ours over stock of the same round. Markdown."""
    heads = ["workload", "variant", *(head for head, _, _ in COLUMNS), "tok/s ratio (range)"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for workload, variant in dict.fromkeys((row["workload"], row["variant"]) for row in rows):
        mine = [row for row in rows if (row["workload"], row["variant"]) == (workload, variant)]
        cells = [style.format(statistics.median(map(of, mine))) for _, of, style in COLUMNS]
        stock = {
            row["round"]: row["tok_per_s"]
            for row in rows
            if (row["workload"], row["variant"]) == (workload, "stock")
        }
        found = sorted(
            row["tok_per_s"] / stock[row["round"]] for row in mine if row["round"] in stock
        )
        ratio = ""
        if found and variant != "stock":
            ratio = f"{statistics.median(found):.3f} ({found[0]:.3f}-{found[-1]:.3f})"
        lines.append(f"| {workload} | {variant} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
