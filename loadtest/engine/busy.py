# SPDX-License-Identifier: Apache-2.0
"""A machine that does something else besides: tokens per second with cores kept busy by other processes.

    python -m loadtest.engine.busy [--busy 0 1] [--rounds 3] [--dtype float32] [--out loadtest/results]

Engines live side by side, one works at a time; within a round variants and numbers of busy processes take
turns. Writes a JSONL row per measurement as soon as it is made, and prints medians with their range.
``--resume FILE`` goes on where an interrupted run stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from h2o_vllm.models import default_model_dir
from loadtest.common.command import command_parser
from loadtest.common.plan import SideBySide, carry_out
from loadtest.common.results import RESULTS, Measured, Row, result_path
from loadtest.common.tables import markdown_table, median_range, pick
from loadtest.engine.busy_run import VARIANTS

__all__ = ["Measurement", "main", "planned", "table"]


@dataclass(frozen=True)
class Measurement(Measured):
    """One variant beside ``busy`` processes, in one round."""

    round: int
    busy: int
    variant: str


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, then print."""
    args = parse_arguments(argv)
    path = args.resume or result_path("busy-cpu", args.out)
    rows = measure(args, path)
    print(f"\n{table(rows)}\n\nrows: {path}")


def planned(busy: Sequence[int], variants: Sequence[str], rounds: int) -> Iterator[Measurement]:
    """All measurements in order: within a round variants take turns, forwards and backwards."""
    for turn in range(rounds):
        for place, processes in enumerate(busy):
            for variant in variants if (turn + place) % 2 == 0 else reversed(variants):
                yield Measurement(turn, processes, variant)


def measure(args: argparse.Namespace, path: Path) -> list[Row]:
    """Run what ``path`` lacks, appending to it; returns all rows."""
    names = ("dtype", "requests", "prompt_tokens", "output_tokens")
    settings = {name: getattr(args, name) for name in names}
    first = {"model": args.model or str(default_model_dir()), **settings}
    with SideBySide("loadtest.engine.busy_run", first) as engines:
        return carry_out(
            planned(args.busy, args.variants, args.rounds),
            path,
            "loadtest.engine.busy",
            settings,
            engine_of=lambda one: engines.get(one.variant),
            line=lambda one: str(one.busy),
            shown=lambda one: f"round {one.round + 1}, {one.busy} busy: {one.variant}",
            said=lambda row: f"{row['tok_per_s']:.1f} tok/s",
        )


def table(rows: Sequence[Row]) -> str:
    """Markdown: tokens per second of each variant, medians of the rounds and their range."""
    counts = sorted({row["busy"] for row in rows})
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        speeds = (
            [row["tok_per_s"] for row in pick(rows, variant=variant, busy=count)]
            for count in counts
        )
        lines.append([f"`{variant}`", *(median_range(found, 1) for found in speeds)])
    return markdown_table(["tok/s", *(f"{count} busy" for count in counts)], lines)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.engine.busy", __doc__)
    add, variants = parser.add_argument, list(VARIANTS)
    add("--busy", nargs="+", type=int, default=[0, 1], help="processes that keep a core busy each")
    add("--variants", nargs="+", choices=variants, default=variants, help="layouts")
    add("--rounds", type=int, default=3, help="how often; variants alternate")
    add("--requests", type=int, default=16, help="at once")
    add("--prompt-tokens", type=int, default=256, help="of each request")
    add("--output-tokens", type=int, default=64, help="of each request")
    add("--dtype", choices=("bfloat16", "float32"), default="float32", help="of weights and KV")
    add("--model", help="a model directory; by default the embedded model")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    add("--resume", type=Path, help="a JSONL file of an earlier run: measure only what it lacks")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
