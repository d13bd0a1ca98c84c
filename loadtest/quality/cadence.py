# SPDX-License-Identifier: Apache-2.0
"""What evicting by blocks costs: the paper's cadence, one token for each that comes, against ours.

    python -m loadtest.quality.cadence [--texts 8] [--budgets 0.1 0.2 0.5] [--out FILE.jsonl]

No engine: both cadences run in ``tests.reference.h2o``, the plain-torch H2O that the engine's kept
sets are tested to equal, in float32 with the embedded model. Every cadence reads the same prompts with full
attention once, is then fed the same real continuations, and is scored on each token's negative
log-likelihood (NLL). Of two cadences that differ in their recent window as well, a third one tells
the two effects apart: blocks of 32 whose window is not rounded to whole blocks.

Writes one JSONL row per text, budget and cadence, a table and a PNG beside it. Run again with the same
``--out``, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from loadtest.common.machine import describe_run
from loadtest.common.results import Row, append_rows, read_rows
from loadtest.common.texts import Prompts, documentation
from loadtest.quality import reference_run
from loadtest.quality.reference_run import rounded_mean, show_progress

__all__ = ["CADENCES", "Cadence", "overlap"]


class Cadence(NamedTuple):
    """Tokens evicted at a time, and of what the beginning of the recent window is a multiple."""

    name: str
    block: int
    window_unit: int


CADENCES = (
    Cadence("token", 1, 1),
    Cadence("block-16", 16, 16),
    Cadence("block-32", 32, 32),
    Cadence("block-32-exact-window", 32, 1),
)
"""The first is the paper's; the others are compared with it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, then print and write the table and the picture."""
    from loadtest.quality.cadence_report import plot, report

    args = parse_arguments(argv)
    rows = read_rows(args.out)
    done = {(row["budget"], row["text"]) for row in rows}
    for first in range(0, args.texts, args.batch):
        texts = range(first, min(first + args.batch, args.texts))
        missing = [b for b in args.budgets if not done.issuperset((b, text) for text in texts)]
        if missing:
            for measured in measure(args, texts, missing):
                rows += measured
                append_rows(args.out, measured)
    reference_run.publish(rows, args.out, report, plot)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = reference_run.new_parser("cadence", (__doc__ or "").splitlines()[0], 1280)
    add = parser.add_argument
    add("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.5], help="shares of tokens kept")
    add("--batch", type=int, default=8, help="texts that are computed together")
    add("--recent", type=float, default=0.5, help="share of a budget for the newest tokens")
    add("--tokens", type=int, default=256, help="tokens forced afterwards")
    return reference_run.parse(parser, argv)


def measure(args: argparse.Namespace, texts: range, budgets: list[float]) -> Iterator[list[Row]]:
    """The rows of one batch of texts, budget by budget."""
    from tests.reference.h2o import Reference

    settings = {"recent": args.recent, "prompt_tokens": args.prompt_tokens, "tokens": args.tokens}
    description = describe_run("loadtest.quality.cadence") | settings
    tokens = text_tokens(args, texts)
    prompts, forced = tokens[:, : args.prompt_tokens], tokens[:, args.prompt_tokens :]
    model = Reference(args.model, 1.0, args.recent, 1, floor=1)
    place = f"texts {texts.start + 1}-{texts.stop}"
    show_progress(f"{place}: full KV")
    model.read(prompts, chunk=128)
    prompt_state = model.snapshot()
    full = -model.force(forced)
    for budget in budgets:
        model.fraction = budget
        paper: list[torch.Tensor] = []
        rows: list[Row] = []
        for cadence in CADENCES:
            show_progress(f"{place}: budget {budget}, {cadence.name}")
            model.block, model.window_unit = cadence.block, cadence.window_unit
            model.layers = prompt_state
            model.layers = model.snapshot()
            nll = -model.force(forced)
            # [B, L, KH, S].
            kept = torch.stack([cache.alive for _, cache in sorted(model.layers.items())], 1)
            paper = paper or list(kept)
            rows += [
                description
                | {"text": text, "budget": budget, "variant": cadence.name, "held": model.held}
                | {"nll_full": rounded_mean(full[i]), "nll": rounded_mean(nll[i])}
                | overlap(kept[i], paper[i], model.recent_from)
                for i, text in enumerate(texts)
            ]
        yield rows


def text_tokens(args: argparse.Namespace, texts: range) -> torch.Tensor:
    """Prompts and their continuations, [B, T + N + 1]: the first forced token is scored by nobody."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    wanted = args.prompt_tokens + args.tokens + 1
    # Longer than wanted, then cut: characters only tell about how many tokens there will be.
    stretches = Prompts([documentation()], 2 * wanted, lambda t: len(tokenizer(t).input_ids))
    return torch.tensor([tokenizer(stretches[text]).input_ids[:wanted] for text in texts])


def overlap(mine: torch.Tensor, paper: torch.Tensor, recent_from: int) -> Row:
    """How alike two cadences' kept sets are, on average over layers and heads, after the last token.

    Args:
        mine, paper: who is kept, [L, KH, S]. recent_from: where the recent window of ``mine`` begins.

    Returns:
        ``jaccard``: intersection over union; ``covered``: share of the paper's set that is in ours;
        ``covered_heavy``: the same among tokens before the recent window.
    """
    both = (mine & paper).sum(-1)
    heavy, both_heavy = paper[..., :recent_from], (mine & paper)[..., :recent_from]
    return {
        "jaccard": rounded_mean(both / (mine | paper).sum(-1)),
        "covered": rounded_mean(both / paper.sum(-1)),
        "covered_heavy": rounded_mean(both_heavy.sum(-1) / heavy.sum(-1)),
    }


if __name__ == "__main__":
    main()
