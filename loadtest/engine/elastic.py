# SPDX-License-Identifier: Apache-2.0
"""Elastic budgets under rising load: what is lost, and how fast, against stock vLLM and a fixed budget.

    python -m loadtest.engine.elastic [--loads 1 4 16 ...] [--rounds 1] [--out loadtest/results]
    python -m loadtest.engine.elastic --quick

Real texts, so many at once, on a pool that holds four of them whole. Each is 1,000 tokens of prompt and
512 that are forced, so that one run says how fast they were served and what the model thought of them.
Engines live side by side, one works at a time. Writes a JSONL row per measurement as soon as it is made, a
table (Markdown) and a PNG. ``--resume FILE`` goes on where an interrupted run stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from h2o_vllm.models import default_model_dir
from loadtest.common.command import command_parser
from loadtest.common.plan import SideBySide, carry_out
from loadtest.common.results import RESULTS, Measured, Row, publish, result_path
from loadtest.engine.elastic_report import markdown, plot_elastic
from loadtest.engine.elastic_traffic import LOADS, VARIANTS

__all__ = ["Measurement", "main", "planned"]

QUICK = {"scale": 0.25, "rounds": 1, "eager": True, "loads": [1, 4, 24]}


@dataclass(frozen=True)
class Measurement(Measured):
    """One variant under one load, in one round."""

    round: int
    load: int
    variant: str


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, then publish."""
    args = parse_arguments(argv)
    path = args.resume or result_path("elastic-cpu", args.out)
    rows = measure(args, path)
    publish(path, markdown(rows), plot_elastic(rows, path.with_suffix(".png")))


def planned(loads: Sequence[int], variants: Sequence[str], rounds: int) -> Iterator[Measurement]:
    """All measurements in order: within a round variants take turns, forwards and backwards."""
    for turn in range(rounds):
        for place, load in enumerate(loads):
            for variant in variants if (turn + place) % 2 == 0 else reversed(variants):
                yield Measurement(turn, load, variant)


def measure(args: argparse.Namespace, path: Path) -> list[Row]:
    """Run what ``path`` lacks, appending to it; returns all rows."""
    settings = {"scale": args.scale, "dtype": args.dtype, "eager": args.eager}
    first = {"model": args.model or str(default_model_dir()), **settings}
    with SideBySide("loadtest.engine.elastic_run", first) as engines:
        return carry_out(
            planned(args.loads, args.variants, args.rounds),
            path,
            "loadtest.engine.elastic",
            settings,
            engine_of=lambda one: engines.get(one.variant),
            line=lambda one: json.dumps(asdict(one)),
            shown=lambda one: f"round {one.round + 1} {one.load} texts: {one.variant}",
            said=lambda row: (
                f"{row['tok_per_s']:.1f} tok/s, {100 * row['lossless']:.0f} % lossless"
            ),
        )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.engine.elastic", __doc__)
    add, variants = parser.add_argument, list(VARIANTS)
    add("--loads", nargs="+", type=int, default=list(LOADS), help="texts at once")
    add("--variants", nargs="+", choices=variants, default=variants, help="by what")
    add("--rounds", type=int, default=1, help="how often; variants alternate")
    add("--scale", type=float, default=1.0, help="multiplies the texts' lengths; to rehearse")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV")
    add("--eager", action="store_true", help="no torch.compile: engines start within seconds")
    add("--quick", action="store_true", help="small and eager: does it run?")
    add("--model", help="a model directory; by default the embedded model")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    add("--resume", type=Path, help="a JSONL file of an earlier run: measure only what it lacks")
    args = parser.parse_args(argv)
    if args.quick:
        vars(args).update(QUICK)
    return args


if __name__ == "__main__":
    main()
