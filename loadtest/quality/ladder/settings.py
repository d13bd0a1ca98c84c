# SPDX-License-Identifier: Apache-2.0
"""The ladder's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadtest.common.command import command_parser
from loadtest.common.results import RESULTS, result_file
from loadtest.quality.ladder.facts import PROTOCOLS
from loadtest.quality.ladder.keep import Rung, parse_rung
from loadtest.quality.ladder.summaries import SUMMARIES
from loadtest.quality.ruler.tasks import TASKS

__all__ = ["RUNGS", "parse_arguments"]

OURS = ("h2o", "h2o-norm", "caote", "snapkv", "tova", "keydiff", "window", "random", "repeat",
        "repeat-sum", "snapkv+repeat", "h2o-norm+snapkv", "caote+repeat", "caote+snapkv+repeat")  # fmt: skip
SHARING = ("repeat", "keydiff", "snapkv", "snapkv+repeat", "caote+snapkv+repeat")
CONTROLS = ("ObservedAttention", "SnapKV", "KeyDiff", "ExpectedAttention", "KVzip", "KVzip:layer",
            "KVzip:global")  # fmt: skip

RUNGS = (
    *OURS,
    *(f"{name}:{heads}" for name in SHARING for heads in ("layer", "global")),
    *(f"{name}:0.25" for name in ("snapkv", "keydiff", "repeat", "snapkv+repeat")),
    *(f"{name}:layer:0.25" for name in ("repeat", "snapkv+repeat")),
    *CONTROLS,
)
"""All there are by default."""

BUDGETS = (0.5, 0.25, 0.125)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = command_parser(
        "loadtest.quality.ladder",
        "Many ways to choose what stays, on the same prompts, without an engine.",
    )
    add = parser.add_argument
    add("--model", help="a model directory; by default the embedded model")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV")
    usual = [*PROTOCOLS, "nll"]
    add("--measures", nargs="+", choices=(*usual, SUMMARIES), default=usual,
        help="RULER, the question known or asked later; NLL of real texts; ROUGE of summaries")  # fmt: skip
    add("--rungs", nargs="+", type=_rung, metavar="RUNG", default=list(map(parse_rung, RUNGS)),
        help="SCORE[+SCORE...][:layer|:global][:RECENT]")  # fmt: skip
    for protocol in PROTOCOLS:
        add(f"--{protocol}-budgets", type=_budget, nargs="+", default=list(BUDGETS),
            metavar="SHARE", help=f"shares of tokens kept, question {protocol}")  # fmt: skip
    add("--delays", type=_delay, nargs="*", default=[], metavar="TOKENS",
        help="generated before the first eviction, behind a prompt that ends with the question")  # fmt: skip
    for measure in ("nll", SUMMARIES):
        add(f"--{measure}-budgets", type=_budget, nargs="+", default=[0.2], metavar="SHARE",
            help=f"the same, of {measure}")  # fmt: skip
    add("--tasks", nargs="+", choices=TASKS, metavar="TASK", default=list(TASKS), help="RULER's")
    add("--samples", type=int, default=2, help="of each task")
    add("--first", type=int, default=0, help="number of the first sample")
    add("--length", type=int, default=2048, help="tokens of prompt and answer")
    add("--answer-tokens", type=int, default=64, help="of an answer at most, where RULER has more")
    add("--xsum", type=Path, metavar="FILE", help="the H2O authors' requests")
    add("--summaries", type=int, default=40, help="of xsum")
    add("--texts", type=int, default=8, help="of nll")
    add("--prompt-tokens", type=int, default=1024, help="of each text, read with full attention")
    add("--forced-tokens", type=int, default=512, help="of each text, forced afterwards")
    add("--calibration", type=Path, metavar="FILE",
        help="what python -m h2o_vllm.calibrate has made of the model, for zap")  # fmt: skip
    add("--threads", type=int, default=2, help="of torch")
    add("--out", type=result_file, default=RESULTS / "ladder.jsonl",
        help="rows; also of an earlier run to go on with")  # fmt: skip
    add("--report", nargs="+", type=Path, metavar="FILE", help="measure nothing: tables of rows")
    args = parser.parse_args(argv)
    if any(rung.zaps for rung in args.rungs) and args.calibration is None and not args.report:
        parser.error("--rungs: zap needs --calibration FILE")
    if SUMMARIES in args.measures and not args.report:
        if args.xsum is None:
            parser.error(f"--measures: {SUMMARIES} needs --xsum FILE")
        if any(rung.repeats or rung.looks for rung in args.rungs):
            parser.error(
                f"--rungs: {SUMMARIES} has none that repeat the prompt or look ahead of it"
            )
    return args


def _rung(text: str) -> Rung:
    try:
        return parse_rung(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _delay(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number of tokens from 0 on")
    return int(text)


def _budget(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number in (0, 1)")
    return value
