# SPDX-License-Identifier: Apache-2.0
"""The command line."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.common.command import command_parser
from loadtest.common.results import RESULTS
from loadtest.quality.lines import DEFAULT_LINES
from loadtest.quality.measures import MEASURES
from loadtest.quality.offline import FLOOR
from loadtest.quality.sizes import QUICK, Sizes

BUDGETS = (0.2, 0.1, 0.05, 0.3, 0.5, 1.0)
"""The most interesting first: a run that is interrupted has whole budgets."""
QUICK_BUDGETS = (0.2, 1.0)
QUICK_LINES = ("h2o", "window", "random")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be without a model."""
    about = "What eviction costs: every policy and budget on the same samples, against full KV."
    parser = command_parser("loadtest.quality", about)
    usual = Sizes()
    add = parser.add_argument_group("model").add_argument
    add("--model", help="name or directory of the model (default: the embedded model)")
    add("--dtype", default="bfloat16", help="data type of weights and KV")
    add("--block-size", type=int, help="tokens per KV block")
    add("--min-tokens", type=int, default=FLOOR, help="smallest budget in tokens; with a "
        "server's 128 all small budgets would be equal")  # fmt: skip
    add(
        "--calibration", metavar="FILE", help="calibration of the model, for policies that need one"
    )
    add("--running", type=int, default=32, help="most requests in flight")
    add("--eager", action="store_true", help="start the engine without compiling the model")
    add = parser.add_argument_group("what is compared").add_argument
    add("--policies", nargs="+", metavar="LINE",
        help="policies, optionally with request fields, such as snapkv,recent=0.25; default: "
        f"{_list(DEFAULT_LINES)}")  # fmt: skip
    add(
        "--budgets",
        nargs="+",
        type=_budget,
        help=f"shares to keep, measured in this order; default: {_list(BUDGETS)}",
    )
    add(
        "--measures",
        nargs="+",
        choices=MEASURES,
        default=["nll", "retrieval"],
        help="what to measure",
    )
    add("--recent", type=float, help="kv_recent of all policies without their own")
    add("--no-control", action="store_true",
        help="measure full KV only once, not again among the policies or when a run is resumed")  # fmt: skip
    add = parser.add_argument_group("how much is measured").add_argument
    counts = _list(f"{name}={getattr(usual, name)}" for name in MEASURES)
    add("--samples", nargs="+", default=[], metavar="MEASURE=N", type=_count,
        help=f"number of samples of a measure; defaults: {counts}")  # fmt: skip
    add(
        "--prompt-tokens",
        type=int,
        help=f"length of the prompt of a forced text, in tokens; default: {usual.prompt_tokens}",
    )
    add(
        "--forced-tokens",
        type=int,
        help=f"length of the forced part, in tokens; default: {usual.forced_tokens}",
    )
    add("--lengths", nargs="+", type=int,
        help=f"tokens of the texts with hidden facts; default: {_list(usual.lengths)}")  # fmt: skip
    add("--ruler-tokens", type=int,
        help=f"length of RULER's prompts with answers, in tokens; default: {usual.ruler_tokens}")  # fmt: skip
    add("--answer-tokens", type=int,
        help=f"most tokens of a long answer; default: {usual.answer_tokens}")  # fmt: skip
    add(
        "--text-tokens",
        type=int,
        help="tokens of unrelated text before each word problem; default: 0",
    )
    add("--quick", action="store_true", help="a short run that only shows whether everything works")
    add = parser.add_argument_group("results").add_argument
    add("--texts", action="store_true", help="write the generated texts into the rows")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    add("--resume", type=Path, metavar="FILE",
        help="JSONL file of an interrupted run; only missing rows are measured")  # fmt: skip
    add("--report", nargs="+", type=Path, metavar="FILE",
        help="print the tables of these files and measure nothing")  # fmt: skip
    args = parser.parse_args(argv)
    if args.quick:
        args.eager = True
        args.policies = args.policies or list(QUICK_LINES)
    args.budgets = args.budgets or (QUICK_BUDGETS if args.quick else BUDGETS)
    return args


def sizes_of(args: argparse.Namespace) -> Sizes:
    """How much to measure."""
    asked: dict[str, Any] = dict(args.samples)
    for name in ("prompt_tokens", "forced_tokens", "ruler_tokens", "answer_tokens", "text_tokens"):
        if getattr(args, name) is not None:
            asked[name] = getattr(args, name)
    if args.lengths:
        asked["lengths"] = tuple(args.lengths)
    return dataclasses.replace(QUICK if args.quick else Sizes(), **asked)


def _list(values: Any) -> str:
    return " ".join(str(value) for value in values)


def _budget(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number in (0, 1]")
    return value


def _count(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name not in MEASURES or not count.isdigit() or not int(count):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted such as nll=40, one of {', '.join(MEASURES)}"
        )
    return name, int(count)
