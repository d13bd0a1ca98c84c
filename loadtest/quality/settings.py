# SPDX-License-Identifier: Apache-2.0
"""The command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.common.results import RESULTS, result_path
from loadtest.quality.measures import MEASURES
from loadtest.quality.offline import FLOOR
from loadtest.quality.sizes import QUICK, Sizes

__all__ = ["BUDGETS", "output_path", "parse_arguments", "sizes_of"]

BUDGETS = (0.2, 0.1, 0.05, 0.3, 0.5, 1.0)
"""The most interesting first: a run that is interrupted has whole budgets."""
QUICK_BUDGETS = (0.2, 1.0)
QUICK_LINES = ("h2o", "window", "random")


GENERATIONS = ("forced", "xsum", "retrieval", "long", "ruler")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be without a model."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.quality",
        description="What eviction costs: every policy and budget on the same samples, against full KV.",
    )
    _add_model(parser.add_argument_group("model"))
    _add_comparison(parser.add_argument_group("what is compared"))
    _add_sizes(parser.add_argument_group("how much is measured"))
    _add_results(parser.add_argument_group("results"))
    args = parser.parse_args(argv)
    if args.quick:
        args.eager = True
        args.policies = args.policies or list(QUICK_LINES)
    args.budgets = args.budgets or (QUICK_BUDGETS if args.quick else BUDGETS)
    if args.measures and "xsum" in args.measures and args.xsum is None and not args.report:
        parser.error("--measures: xsum needs --xsum FILE")
    return args


def _add_model(group: Any) -> None:
    """Who generates."""
    add = group.add_argument
    add("--model", help="name or directory; default: the embedded model. With --url its name there")
    add("--url", help="measure a running server instead of an engine in this process")
    add("--api-key", default="", help="of that server")
    add("--dtype", default="bfloat16", help="of the engine; default: %(default)s")
    add("--block-size", type=int, help="of the engine's KV blocks")
    add("--min-tokens", type=int, default=FLOOR, help="kv_min_tokens of the engine; default: %(default)s, "
        "that of a server would make small budgets equal")  # fmt: skip
    add("--calibration", metavar="FILE", help="of the model, for policies that want one")
    add("--running", type=int, default=32, help="requests at a time; default: %(default)s")
    add("--eager", action="store_true", help="start the engine without compiling the model")


def _add_comparison(group: Any) -> None:
    """Policies, budgets, measures."""
    add = group.add_argument
    add("--policies", nargs="+", metavar="LINE",
        help="policies, with extras such as h2o+sinks4 or tova+recent0.25; default: all")  # fmt: skip
    add("--budgets", nargs="+", type=_budget, help=f"in this order; default: {_list(BUDGETS)}")
    add("--measures", nargs="+", choices=MEASURES,
        help="default: all that can be measured, but ruler")  # fmt: skip
    add("--recent", type=float, help="kv_recent of all lines that do not have their own")
    add("--no-control", action="store_true",
        help="do not measure full KV a second time among the others")  # fmt: skip


def _add_sizes(group: Any) -> None:
    """Samples and lengths."""
    add, usual = group.add_argument, Sizes()
    counts = _list(f"{name}={getattr(usual, name)}" for name in GENERATIONS)
    add("--samples", nargs="+", default=[], metavar="GENERATION=N", type=_count,
        help=f"how many; forced are those of nll and drift; defaults: {counts}")  # fmt: skip
    add("--xsum", type=Path, metavar="FILE",
        help="the H2O authors' requests; without it xsum is left out")  # fmt: skip
    add("--prompt-tokens", type=int, help=f"of each forced text; default: {usual.prompt_tokens}")
    add("--forced-tokens", type=int, help=f"of each forced text; default: {usual.forced_tokens}")
    add("--lengths", nargs="+", type=int,
        help=f"of texts with hidden facts; default: {_list(usual.lengths)}")  # fmt: skip
    add("--long-tokens", type=int, help=f"of long answers; default: {usual.long_tokens}")
    add("--ruler-tokens", type=int,
        help=f"of RULER's prompts, with answers; default: {usual.ruler_tokens}")  # fmt: skip
    add("--quick", action="store_true",
        help="a minute's run that shows whether everything works, no more")  # fmt: skip


def _add_results(group: Any) -> None:
    """Files."""
    add = group.add_argument
    add("--texts", action="store_true", help="write what was generated into the rows")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    add("--resume", type=Path, metavar="FILE",
        help="an interrupted run's file: measure only what it lacks")  # fmt: skip
    add("--report", nargs="+", type=Path, metavar="FILE",
        help="measure nothing: tables and picture of rows")  # fmt: skip


def sizes_of(args: argparse.Namespace) -> Sizes:
    """How much to measure."""
    asked: dict[str, Any] = dict(args.samples)
    for name in ("prompt_tokens", "forced_tokens", "long_tokens", "ruler_tokens"):
        if getattr(args, name) is not None:
            asked[name] = getattr(args, name)
    if args.lengths:
        asked["lengths"] = tuple(args.lengths)
    return dataclasses.replace(QUICK if args.quick else Sizes(), xsum_file=args.xsum, **asked)


def output_path(args: argparse.Namespace) -> Path:
    """Where the rows go."""
    if args.resume is not None:
        return Path(args.resume)
    return result_path("quality-live" if args.url else "quality-cpu", args.out)


def _list(values: Any) -> str:
    return " ".join(str(value) for value in values)


def _budget(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number in (0, 1]")
    return value


def _count(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name not in GENERATIONS or not count.isdigit() or not int(count):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted such as xsum=40, one of {', '.join(GENERATIONS)}"
        )
    return name, int(count)
