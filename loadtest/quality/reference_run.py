# SPDX-License-Identifier: Apache-2.0
"""What ``cadence`` and ``foresight`` share: options and publishing of runs of the plain-torch H2O."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from loadtest.common.command import command_parser
from loadtest.common.results import RESULTS, Row, result_file
from loadtest.common.statistics import Estimate, ratio

__all__ = [
    "EMBEDDED", "budgets_of", "in_order", "loss", "new_parser", "parse", "percent_loss", "publish",
    "rounded_mean", "show_progress",
]  # fmt: skip

EMBEDDED = "SmolLM2-135M-Instruct"


def new_parser(name: str, description: str, prompt_tokens: int) -> argparse.ArgumentParser:
    """The options both have; ``name`` is the module's."""
    parser = command_parser(f"loadtest.quality.{name}", description)
    add = parser.add_argument
    add("--texts", type=int, default=8, help="how many")
    add("--prompt-tokens", type=int, default=prompt_tokens, help="tokens read with full attention")
    add("--threads", type=int, default=1, help="of torch")
    out = RESULTS / f"{name}.jsonl"
    add("--out", type=result_file, default=out, help="rows; also of an earlier run to go on with")
    add("--model", help="a model directory; by default the embedded model")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, the embedded model in place of none; sets torch's threads."""
    args = parser.parse_args(argv)
    if args.model is None:
        from h2o_vllm.models import default_model_dir

        args.model = str(default_model_dir())
    torch.set_num_threads(args.threads)
    return args


def publish(
    rows: list[Row],
    out: Path,
    report: Callable[[list[Row], str], str],
    plot: Callable[[list[Row], Path], Path],
) -> None:
    """Print the table, and write it and the picture beside the rows."""
    text = report(rows, out.stem)
    out.with_suffix(".md").write_text(text)
    plot(rows, out.with_suffix(".png"))
    print(text)


def rounded_mean(values: torch.Tensor) -> float:
    """Rounded to what float32 can tell."""
    return round(float(values.double().mean()), 6)


def show_progress(text: str) -> None:
    """What is being computed, for who waits."""
    print(text, file=sys.stderr, flush=True)


def budgets_of(rows: Iterable[Row]) -> list[float]:
    """Ascending."""
    return sorted({row["budget"] for row in rows})


def in_order(rows: Iterable[Row], key: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that some row has as ``key``."""
    present = {row[key] for row in rows}
    return [name for name in names if name in present]


def percent_loss(row: Row) -> float:
    """How much worse than with full KV the text was predicted, in percent of its NLL."""
    return 100 * (float(row["nll"]) / float(row["nll_full"]) - 1)


def loss(rows: Sequence[Row]) -> Estimate:
    """Of the mean NLL, in percent of full KV's; paired by text."""
    both = ratio([row["nll"] for row in rows], [row["nll_full"] for row in rows])
    return both.shifted(-1).scaled(100)
