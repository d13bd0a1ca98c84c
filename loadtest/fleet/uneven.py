# SPDX-License-Identifier: Apache-2.0
"""Replicas with unequal budgets: does the one that evicts, and so has room for more, get more requests?

    python -m loadtest.fleet.uneven [--policies round_robin power_of_two] [--requests 48]

Two replicas of ``h2o-serve`` with the same small pool of KV, one keeps everything, the other 0.2 of it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from h2o_vllm.models import default_model_dir
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, Row, append_rows, publish, result_path
from loadtest.common.tables import markdown_table, provenance
from loadtest.fleet.replicas import POLICIES, Fleet, served, with_router_version
from loadtest.http.headless import locust_running
from loadtest.http.records import ALL, read_runs, summarise

__all__ = ["main", "markdown"]

BUDGETS = ("1.0", "0.2")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print."""
    args = parse_arguments(argv)
    path = result_path("fleet-uneven", args.out)
    model = args.model or default_model_dir()
    rows: list[Row] = []
    for policy in args.policies:
        with tempfile.TemporaryDirectory() as folder:
            row = with_router_version(describe_run("loadtest.fleet.uneven"))
            row |= {"policy": policy, **measure(model, policy, Path(folder), args)}
        rows.append(row)
        append_rows(path, [row])
        print(table(rows).splitlines()[-1], flush=True)
    publish(path, markdown(rows))


def measure(model: Path, policy: str, folder: Path, args: argparse.Namespace) -> Row:
    """Serve all requests: how many each replica took, and how fast both were together."""
    length = args.prompt_tokens + args.prompt_tokens // 5 + args.output_tokens + 64
    small = ["--num-gpu-blocks-override", str(args.blocks), "--block-size", "32",
             "--max-model-len", str(length)]  # fmt: skip
    file = folder / "records.jsonl"
    options = [[*small, "--kv-budget", budget] for budget in BUDGETS]
    with Fleet(model, folder, options, policy) as fleet:
        before = [served(replica.url) for replica in fleet.replicas]
        load = {
            "--host": fleet.router.url, "--model": "model", "-u": args.users, "-r": args.users,
            "--requests": args.requests, "--warmup": 0, "--prompt-tokens": args.prompt_tokens,
            "--output-tokens": args.output_tokens, "--jsonl": file,
        }  # fmt: skip
        with locust_running(load):
            pass
        after = [served(replica.url) for replica in fleet.replicas]
    summary = summarise(read_runs(file)[0].records)[ALL]
    taken = [end - begin for begin, end in zip(before, after, strict=True)]
    return {"taken": taken, "tok_per_s": summary.tok_per_s, "requests": summary.requests}


def table(rows: Sequence[Row]) -> str:
    """A line per policy."""
    lines = [
        [
            f"`{row['policy']}`",
            *(f"{taken:.0f}" for taken in row["taken"]),
            f"{row['tok_per_s']:.1f}",
        ]
        for row in rows
    ]
    head = [
        "router's policy",
        *(f"requests of the replica that keeps {b}" for b in BUDGETS),
        "tok/s",
    ]
    return markdown_table(head, lines)


def markdown(rows: Sequence[Row]) -> str:
    """The table, with what it was measured on."""
    origin = "\n".join(provenance(rows))
    return f"# Unequal budgets\n\n{origin}\n{table(rows)}\n"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.fleet.uneven", __doc__)
    default = ["round_robin", "power_of_two", "cache_aware"]
    add = parser.add_argument
    add("--policies", nargs="+", choices=POLICIES, default=default, help="of the router")
    add("--requests", type=int, default=48, help="of each policy's run")
    add("--users", type=int, default=16, help="requests at once")
    add("--prompt-tokens", type=int, default=600, help="mean length of prompts")
    add("--output-tokens", type=int, default=128, help="length of answers")
    add("--blocks", type=int, default=81, help="KV blocks of each replica's pool")
    add("--model", type=Path, help="a model directory; by default the embedded model")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
