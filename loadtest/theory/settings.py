# SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m loadtest.theory``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadtest.common.command import command_parser
from loadtest.common.results import RESULTS, result_file
from loadtest.quality import reference_run

__all__ = ["COMPARED", "parse_arguments"]

COMPARED = (
    "prompt_tokens", "forced_tokens", "budgets", "queries", "triples", "keys", "kept", "seed",
)  # fmt: skip
"""What rows of one file agree in, beside the model."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, the embedded model in place of none; sets torch's threads.

    Raises:
        SystemExit: an option cannot be used; the message names it.
    """
    parser = command_parser(
        "loadtest.theory", "Do the assumptions of the H2O paper's appendix D hold on a real model?"
    )
    add = parser.add_argument
    add("--model", help="a model directory; by default the embedded model")
    add("--texts", type=int, default=4, help="how many, of those of loadtest.quality")
    add("--prompt-tokens", type=int, default=1024, help="of each text, read with full attention")
    add("--forced-tokens", type=int, default=512, help="of each text, step by step afterwards")
    add("--budgets", type=_share, nargs="+", default=[0.5, 0.2, 0.1], metavar="SHARE",
        help="k as shares of the prompt")  # fmt: skip
    add("--queries", type=int, default=8, help="per head whose output is measured")
    add("--triples", type=int, default=64, help="per query: nested sets and a further token")
    add("--keys", type=int, default=14, help="of an instance that is solved by brute force")
    add("--kept", type=int, default=5, help="of them how many are kept")
    add("--seed", type=int, default=20261122, help="of everything that is drawn")
    add("--threads", type=int, default=1, help="of torch")
    add("--out", type=result_file, default=RESULTS / "theory.jsonl",
        help="rows; also of an earlier run to go on with")  # fmt: skip
    add("--report", type=Path, metavar="FILE", help="measure nothing: tables and picture of rows")
    args = reference_run.parse(parser, argv)
    if not 0 < args.kept < args.keys:
        parser.error(f"--kept: got {args.kept}, wanted 1 to {args.keys - 1}, fewer than --keys")
    if args.queries > args.forced_tokens:
        parser.error(f"--queries: got {args.queries}, wanted at most {args.forced_tokens} tokens")
    return args


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number in (0, 1)")
    return value
