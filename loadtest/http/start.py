# SPDX-License-Identifier: Apache-2.0
"""How long a start takes: from the command to the first 200 of ``/health``, and what it costs.

    python -m loadtest.http.start [--servers h2o-serve vllm] [--rounds 5] [-- OPTIONS]

Servers take turns, ours and vLLM's own of the same model with the same options (by default those of the
quickstart). The first round fills caches and does not count. Writes a JSONL row per start as soon as it is
made, and prints medians with their range.
"""

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from h2o_vllm.models import default_model_dir
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, Row, append_rows, result_path
from loadtest.common.servers import H2O_SERVE, VLLM_SERVE, Server
from loadtest.common.tables import markdown_table, median_range, pick

SERVERS = {
    "h2o-serve": (H2O_SERVE, ["--kv-budget", "0.2"]),
    "vllm": (VLLM_SERVE, []),
}
"""Command, and options of its own."""

OPTIONS = ["--enforce-eager", "--dtype", "float32"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, then print."""
    args = parse_arguments(argv)
    path = result_path("start-cpu", args.out)
    rows: list[Row] = []
    options = args.options or OPTIONS
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(args.kv_gib)
    for turn, name in planned(args.servers, args.rounds):
        row = describe_run("loadtest.http.start") | {"round": turn, "server": name}
        row |= {"options": options, "kv_gib": args.kv_gib, **start(name, options, args.model)}
        print(f"round {turn}: {name} {row['start_s']:.1f} s", flush=True)
        if turn > 0:
            rows.append(row)
            append_rows(path, [row])
    print(f"\n{table(rows)}\n\nrows: {path}")


def planned(servers: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Round and name of each start: round 0 is not counted, then they take turns, there and back."""
    for turn in range(rounds + 1):
        for name in servers if turn % 2 == 0 else reversed(servers):
            yield turn, name


def start(name: str, options: Sequence[str], model: str | None) -> Row:
    """Start one, stop it; how long the first took, and what processor time both did."""
    model = model or str(default_model_dir())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        program, own = SERVERS[name]
        with Server(program, ["--model", model, *own, *options], Path(folder) / "log", name=name):
            start_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"start_s": start_s, "cpu_s": cpu}


def table(rows: Sequence[Row]) -> str:
    """Markdown: seconds until each is up, medians of the rounds and their range."""
    lines = []
    for name in dict.fromkeys(row["server"] for row in rows):
        mine = pick(rows, server=name)
        seconds = ([row[key] for row in mine] for key in ("start_s", "cpu_s"))
        lines.append([f"`{name}`", *(median_range(found, 1) for found in seconds)])
    return markdown_table(["", "seconds to start", "processor seconds"], lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.http.start", __doc__)
    add, names = parser.add_argument, [*SERVERS]
    add("--servers", nargs="+", choices=names, default=names, help="servers to start")
    add("--rounds", type=int, default=5, help="starts of each server; the servers alternate")
    add("--kv-gib", type=int, default=4, help="size of the KV pool in GiB")
    add("--model", help="model directory (default: the embedded model)")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    add(
        "options",
        nargs="*",
        help=f"options for all servers, after -- (default: {' '.join(OPTIONS)})",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
