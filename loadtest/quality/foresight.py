# SPDX-License-Identifier: Apache-2.0
"""What could a better ranking win? H2O against one that knows which keys the text will still attend to.

    python -m loadtest.quality.foresight [--texts 8] [--budgets 0.1 0.2] [--out FILE.jsonl]

A policy ranks tokens by what happened; how much a request loses depends on what comes. Here the same
texts as in ``loadtest.quality`` (measure ``nll``) are read three times: with full KV, with H2O, and with
an H2O whose scores are the attention that every key will get from all later queries, taken from the run
with full KV. No policy can know that. What it still loses is the price of holding so few tokens; what lies
between it and H2O is the price of not knowing.

No engine: ``tests.reference.h2o``, in float32; the engine's kept sets are tested to equal its.
Writes one JSONL row per text, budget and ranking, a table and a PNG beside it. Run again with the same
``--out``, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch

from loadtest.common.machine import describe_run
from loadtest.common.results import Row, append_rows, read_rows
from loadtest.quality import reference_run
from loadtest.quality.generation import Model
from loadtest.quality.measures.nll import forced_samples
from loadtest.quality.reference_run import rounded_mean, show_progress
from loadtest.quality.sizes import Sizes

__all__ = ["RANKINGS", "Ranking"]

BLOCK, FLOOR = 32, 16


class Ranking(NamedTuple):
    """By what an eviction ranks, and the share of the budget that the newest tokens have whatever it says."""

    name: str
    foresees: bool
    recent: float


RANKINGS = (
    Ranking("past", False, 0.5),
    Ranking("future", True, 0.5),
    Ranking("future, recent 0.1", True, 0.1),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, then print and write the table and the picture."""
    from loadtest.quality.foresight_report import plot, report

    args = parse_arguments(argv)
    rows = read_rows(args.out)
    done = {(row["text"], row["budget"], row["ranking"]) for row in rows}
    for name, prompt, forced in texts(args):
        missing = [
            (budget, ranking)
            for budget in args.budgets
            for ranking in RANKINGS
            if (name, budget, ranking.name) not in done
        ]
        for row in measure(args, name, prompt, forced, missing) if missing else ():
            rows.append(row)
            append_rows(args.out, [row])
    reference_run.publish(rows, args.out, report, plot)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = reference_run.new_parser("foresight", (__doc__ or "").splitlines()[0], 1024)
    add = parser.add_argument
    add("--budgets", type=float, nargs="+", default=[0.2, 0.1], help="shares of tokens kept")
    add("--forced-tokens", type=int, default=512, help="tokens forced afterwards")
    return reference_run.parse(parser, argv)


def texts(args: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Names, prompts and forced tokens, each [1, N]."""
    from transformers import AutoTokenizer

    class Tokenizer:
        def __init__(self) -> None:
            self._tokenizer = AutoTokenizer.from_pretrained(args.model)

        def encode(self, text: str) -> list[int]:
            # Not through the length check: passages are longer than any context.
            return cast(list[int], self._tokenizer.encode(text, verbose=False))

    sizes = Sizes(
        forced=args.texts, prompt_tokens=args.prompt_tokens, forced_tokens=args.forced_tokens
    )
    for sample in forced_samples(cast(Model, Tokenizer()), sizes):
        prompt, forced = (
            torch.tensor([sample.request.prompt]),
            torch.tensor([sample.request.forced]),
        )
        yield sample.name, prompt, forced


def measure(
    args: argparse.Namespace,
    name: str,
    prompt: torch.Tensor,
    forced: torch.Tensor,
    missing: list[tuple[float, Ranking]],
) -> Iterator[Row]:
    """The rows of one text."""
    from tests.reference.h2o import Foresight

    description = describe_run("loadtest.quality.foresight")
    show_progress(f"{name}: full KV")
    model = Foresight(args.model, 1.0, 0.5, BLOCK, FLOOR)
    model.read(prompt)
    before = model.snapshot()
    full = rounded_mean(-model.foresee(forced))
    for budget, ranking in missing:
        show_progress(f"{name}: budget {budget:g}, {ranking.name}")
        model.fraction, model.recent, model.foresees = budget, ranking.recent, ranking.foresees
        model.layers = before
        model.layers = model.snapshot()
        nll = rounded_mean(-model.force(forced))
        yield description | {
            "text": name, "budget": budget, "ranking": ranking.name, "recent": ranking.recent,
            "prompt_tokens": args.prompt_tokens, "tokens": args.forced_tokens,
            "nll_full": full, "nll": nll, "held": model.held,
        }  # fmt: skip


if __name__ == "__main__":
    main()
