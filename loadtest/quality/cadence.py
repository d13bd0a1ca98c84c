# SPDX-License-Identifier: Apache-2.0
"""What evicting by blocks costs: the paper's cadence, one token for each that comes, against ours.

    python -m loadtest.quality.cadence [--texts 8] [--budgets 0.1 0.2 0.5] [--out FILE.jsonl]

No engine: both cadences run in ``loadtest.quality.reference_h2o``, the plain-torch H2O that the engine's kept
sets are tested to equal, in float32 with the embedded model. Every variant reads the same prompts with full
attention once, is then fed the same real continuations, and is scored on each token's negative
log-likelihood (NLL). Of two cadences that differ in their recent window as well, a third variant tells
the two effects apart: blocks of 32 whose window is not rounded to whole blocks.

Writes one JSONL row per text, budget and variant, a table and a PNG beside it. Run again with the same
``--out``, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from loadtest.common.machine import describe_run
from loadtest.common.texts import Prompts, documentation

Row = dict[str, Any]


class Variant(NamedTuple):
    """A cadence: tokens evicted at a time, and of what the beginning of the recent window is a multiple."""

    name: str
    block: int
    window_unit: int


VARIANTS = (
    Variant("token", 1, 1),
    Variant("block-16", 16, 16),
    Variant("block-32", 32, 32),
    Variant("block-32-exact-window", 32, 1),
)
"""The first is the paper's; the others are compared with it."""


def main() -> None:
    """Measure what is missing, then print and write the table and the picture."""
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(args.out)
    done = {(row["budget"], row["text"]) for row in rows}
    for first in range(0, args.texts, args.batch):
        texts = range(first, min(first + args.batch, args.texts))
        missing = [b for b in args.budgets if not done.issuperset((b, text) for text in texts)]
        if missing:
            for measured in measure(args, texts, missing):
                rows += measured
                with args.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in measured)
    from loadtest.quality.cadence_report import plot, report

    publish(rows, args.out, report, plot)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--texts", type=int, default=8, help="stretches of Python's documentation")
    add("--batch", type=int, default=8, help="texts that are computed together")
    add("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.5], help="shares of tokens kept")
    add("--recent", type=float, default=0.5, help="share of a budget for the newest tokens")
    add("--prompt-tokens", type=int, default=1280, help="tokens read with full attention")
    add("--tokens", type=int, default=256, help="tokens forced afterwards")
    add("--threads", type=int, default=1, help="of torch")
    out = Path(__file__).parents[1] / "results" / "cadence.jsonl"
    add("--out", type=Path, default=out, help="rows; also of an earlier run to go on with")
    add("--model", help="a model directory; by default the embedded model")
    args = parser.parse_args()
    if args.model is None:
        from h2o_vllm.models import default_model_dir

        args.model = str(default_model_dir())
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


def read_rows(path: Path) -> list[Row]:
    """The rows of an earlier run, if there are any."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(args: argparse.Namespace, texts: range, budgets: list[float]) -> Iterator[list[Row]]:
    """The rows of one batch of texts, budget by budget."""
    from loadtest.quality.reference_h2o import Reference

    torch.set_num_threads(args.threads)
    about = describe_run("loadtest.quality.cadence")
    tokens = text_tokens(args, texts)
    prompts, forced = tokens[:, : args.prompt_tokens], tokens[:, args.prompt_tokens :]
    model = Reference(args.model, 1.0, args.recent, 1, floor=1)
    show(f"texts {texts.start + 1}-{texts.stop}: full KV")
    model.read(prompts, chunk=128)
    prompt_state = model.snapshot()
    full = -model.force(forced)
    for budget in budgets:
        model.fraction = budget
        paper: list[torch.Tensor] = []
        rows: list[Row] = []
        for variant in VARIANTS:
            show(f"texts {texts.start + 1}-{texts.stop}: budget {budget}, {variant.name}")
            model.block, model.window_unit = variant.block, variant.window_unit
            model.layers = prompt_state
            model.layers = model.snapshot()
            nll = -model.force(forced)
            kept = [cache.alive for _, cache in sorted(model.layers.items())]
            paper = paper or kept
            for place, text in enumerate(texts):
                mine, its = ([alive[place] for alive in sets] for sets in (kept, paper))
                rows.append(
                    about
                    | {"text": text, "budget": budget, "variant": variant.name}
                    | {
                        "recent": args.recent,
                        "prompt_tokens": args.prompt_tokens,
                        "tokens": args.tokens,
                    }
                    | {"nll_full": mean(full[place]), "nll": mean(nll[place]), "held": model.held}
                    | overlap(torch.stack(mine), torch.stack(its), model.recent_from)
                )
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
        "jaccard": mean(both / (mine | paper).sum(-1)),
        "covered": mean(both / paper.sum(-1)),
        "covered_heavy": mean(both_heavy.sum(-1) / heavy.sum(-1)),
    }


def mean(values: torch.Tensor) -> float:
    """Rounded to what float32 can tell."""
    return round(float(values.double().mean()), 6)


def show(what: str) -> None:
    """What is being computed, for who waits."""
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
