# SPDX-License-Identifier: Apache-2.0
"""What could a better ranking win? H2O against one that knows which keys the text will still attend to.

    python -m loadtest.quality.foresight [--texts 8] [--budgets 0.1 0.2] [--out FILE.jsonl]

A policy ranks tokens by what happened; how much a request loses depends on what comes. Here the same
texts as in ``loadtest.quality`` (measure ``nll``) are read three times: with full KV, with H2O, and with
an H2O whose scores are the attention that every key will get from all later queries, taken from the run
with full KV. No policy can know that. What it still loses is the price of holding so few tokens; what lies
between it and H2O is the price of not knowing.

No engine: ``loadtest.quality.reference_h2o``, in float32; the engine's kept sets are tested to equal its.
Writes one JSONL row per text, budget and ranking, a table and a PNG beside it. Run again with the same
``--out``, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from loadtest.common.machine import describe_run
from loadtest.quality.cadence import mean, publish, read_rows, show

Row = dict[str, Any]

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


def main() -> None:
    """Measure what is missing, then print and write the table and the picture."""
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
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
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    from loadtest.quality.foresight_report import plot, report

    publish(rows, args.out, report, plot)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--texts", type=int, default=8, help="how many")
    add("--budgets", type=float, nargs="+", default=[0.2, 0.1], help="shares of tokens kept")
    add("--prompt-tokens", type=int, default=1024, help="tokens read with full attention")
    add("--forced-tokens", type=int, default=512, help="tokens forced afterwards")
    add("--threads", type=int, default=1, help="of torch")
    out = Path(__file__).parents[1] / "results" / "foresight.jsonl"
    add("--out", type=Path, default=out, help="rows; also of an earlier run to go on with")
    add("--model", help="a model directory; by default the embedded model")
    args = parser.parse_args()
    if args.model is None:
        from h2o_vllm.models import default_model_dir

        args.model = str(default_model_dir())
    return args


def texts(args: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Names, prompts and forced tokens, each [1, N]."""
    from transformers import AutoTokenizer

    from loadtest.quality.asks import Model
    from loadtest.quality.measures.nll import forced_samples
    from loadtest.quality.sizes import Sizes

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
        prompt, forced = torch.tensor([sample.ask.prompt]), torch.tensor([sample.ask.forced])
        yield sample.name, prompt, forced


def measure(
    args: argparse.Namespace,
    name: str,
    prompt: torch.Tensor,
    forced: torch.Tensor,
    missing: list[tuple[float, Ranking]],
) -> Iterator[Row]:
    """The rows of one text."""
    from loadtest.quality.reference_h2o import Foresight

    torch.set_num_threads(args.threads)
    about = describe_run("loadtest.quality.foresight")
    show(f"{name}: full KV")
    model = Foresight(args.model, 1.0, 0.5, BLOCK, FLOOR)
    model.read(prompt)
    before = model.snapshot()
    full = mean(-model.foresee(forced))
    for budget, ranking in missing:
        show(f"{name}: budget {budget:g}, {ranking.name}")
        model.fraction, model.recent, model.foresees = budget, ranking.recent, ranking.foresees
        model.layers = before
        model.layers = model.snapshot()
        nll = mean(-model.force(forced))
        yield about | {
            "text": name, "budget": budget, "ranking": ranking.name, "recent": ranking.recent,
            "prompt_tokens": args.prompt_tokens, "tokens": args.forced_tokens,
            "nll_full": full, "nll": nll, "held": model.held,
        }  # fmt: skip


if __name__ == "__main__":
    main()
