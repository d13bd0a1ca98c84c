# SPDX-License-Identifier: Apache-2.0
"""Shared beginnings: h2o_vllm against stock vLLM with its prefix cache, in one run, alternating.

    python -m loadtest.engine.prefix [--traffic system chats n] [--rounds 3] [--out loadtest/results]
    python -m loadtest.engine.prefix --quick

Three engines live side by side, one works at a time, and each measurement begins with an empty prefix cache.
Once with ample memory, once with a pool that is too small for all. Writes a JSONL row per measurement as soon
as it is made, tables (Markdown) and a PNG. ``--resume FILE`` goes on where an interrupted run stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.common.child import Child
from loadtest.common.command import command_parser
from loadtest.common.plan import carry_out
from loadtest.common.results import RESULTS, Measured, Row, publish, result_path
from loadtest.engine.prefix_report import markdown, plot_prefix
from loadtest.engine.prefix_traffic import SETTINGS, TRAFFIC, VARIANTS, serves

__all__ = ["Measurement", "main", "planned"]

QUICK = {"scale": 0.2, "rounds": 1, "eager": True}


@dataclass(frozen=True)
class Measurement(Measured):
    """One variant serving one traffic with one amount of memory, in one round."""

    memory: str
    round: int
    traffic: str
    variant: str


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, then publish."""
    args = parse_arguments(argv)
    path = args.resume or result_path("prefix-cpu", args.out)
    rows = measure(args, path)
    publish(path, markdown(rows), plot_prefix(rows, path.with_suffix(".png")))


def planned(
    memory: Sequence[str], traffic: Sequence[str], variants: Sequence[str], rounds: int
) -> Iterator[Measurement]:
    """All measurements in order: within a round variants take turns, forwards and backwards."""
    for amount in memory:
        for turn in range(rounds):
            for name in traffic:
                for variant in variants if turn % 2 == 0 else reversed(variants):
                    if serves(variant, TRAFFIC[name]):
                        yield Measurement(amount, turn, name, variant)


def measure(args: argparse.Namespace, path: Path) -> list[Row]:
    """Run what ``path`` lacks, appending to it; returns all rows."""
    settings = {"scale": args.scale, "eager": args.eager}
    with Engines({"model": args.model or default_model(), **settings}) as engines:
        return carry_out(
            planned(args.memory, args.traffic, args.variants, args.rounds),
            path,
            "loadtest.engine.prefix",
            settings,
            engine_of=engines.get,
            line=lambda one: json.dumps(asdict(one)),
            shown=lambda one: f"{one.memory} round {one.round + 1} {one.traffic}: {one.variant}",
            said=lambda row: (
                f"{row['tok_per_s']:.1f} tok/s, first token {row['first_token_s']['p50']:.2f} s"
            ),
        )


class Engines(ExitStack):
    """The engines of one amount of memory."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self._options = options
        self._memory = ""
        self._live: dict[str, Child] = {}

    def get(self, one: Measurement) -> Child:
        """The engine of a measurement, started if it does not live."""
        if one.memory != self._memory:
            self.close()
            self._live.clear()
            self._memory = one.memory
        engine = VARIANTS[one.variant].engine
        if engine not in self._live:
            print(f"starting {engine}, memory {one.memory}", flush=True)
            first = {**self._options, "setting": one.memory, "variant": one.variant}
            self._live[engine] = self.enter_context(Child("loadtest.engine.prefix_run", first))
        return self._live[engine]


def default_model() -> str:
    """The embedded one."""
    from h2o_vllm.models import default_model_dir

    return str(default_model_dir())


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.engine.prefix", __doc__)
    add = parser.add_argument
    memory, traffic, variants = list(SETTINGS), list(TRAFFIC), list(VARIANTS)
    add("--memory", nargs="+", choices=memory, default=memory, help="how much there is")
    add("--traffic", nargs="+", choices=traffic, default=traffic, help="what to serve")
    add("--variants", nargs="+", choices=variants, default=variants, help="by what")
    add("--rounds", type=int, default=3, help="how often; variants alternate")
    add("--scale", type=float, default=1.0, help="multiplies all lengths; to rehearse")
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
