# SPDX-License-Identifier: Apache-2.0
"""What the paper's method and its theorem assume, measured on real texts, without an engine.

    python -m loadtest.quality.assumptions [--texts 3] [--prompt-tokens 1024] [--tokens 256] [--budget 0.2]

Plain torch, float32, full attention, one row per text. Each figure is a share between 0 and 1, the median
over all layers and KV heads: how concentrated attention is; whether scores so far predict those to come;
whether scores in the cut cache choose as those of full attention do (section 4.1 of arXiv 2306.14048); and
how often the attention output has diminishing returns, which appendix D wants of the function that is
maximised (a sum of scores always has them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from h2o_vllm.models import default_model_dir
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, Row, append_rows, publish, result_path
from loadtest.common.tables import markdown_table, median_range, provenance
from loadtest.quality.passages import passages

__all__ = ["FIGURES", "Reader", "measure"]

FIGURES = {
    "held": "attention of later queries that the most attended tokens so far get",
    "future_h2o": "of the tokens most attended later, found by the sum of scores so far (`h2o`)",
    "future_norm": "the same, by the mean per query that saw the token (`mean`)",
    "future_recent": "the same, by recency",
    "future_chance": "the same, by chance",
    "local": "of the heavy tokens by full attention's scores, chosen by those of the cut cache",
    "returns": "nested sets on which the attention output has diminishing returns",
}
PAIRS, CANDIDATES = 64, 12
"""Nested sets per head, drawn from so many of the tokens that the last query attends to most."""


@dataclass
class Layer:
    """[KH, S, D] each, [KH, S]: which tokens still exist, and the attention each has got, groups summed."""

    keys: Tensor
    values: Tensor
    alive: Tensor
    scores: Tensor


class Reader:
    """A transformers model that reads one text and notes the scores of its tokens."""

    def __init__(self, directory: str) -> None:
        name = f"assumptions_{id(self)}"
        AttentionInterface.register(name, self._attend)
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=name
        ).eval()
        self.layers: dict[int, Layer] = {}
        self.last: dict[int, Tensor] = {}
        """The last query's attention to each token, [KH, S], groups averaged."""

    def read(self, tokens: list[int]) -> None:
        """Go on with so many tokens."""
        seen = self.layers[0].scores.shape[1] if self.layers else 0
        positions = torch.arange(seen, seen + len(tokens))[None]
        self._model(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False,
                    logits_to_keep=1)  # fmt: skip

    def copy(self) -> dict[int, Layer]:
        """What has been read, to go back to."""
        return {
            n: Layer(x.keys, x.values, x.alive.clone(), x.scores) for n, x in self.layers.items()
        }

    def evict(self, budget: int) -> None:
        """H2O: the least scored of those that are not recent go, until ``budget`` tokens are left."""
        for layer in self.layers.values():
            seen = layer.scores.shape[1]
            older = layer.alive.clone()
            older[:, seen - budget // 2 :] = False
            excess = int(layer.alive[0].sum()) - budget
            if excess > 0:
                lowest = layer.scores.masked_fill(~older, torch.inf).argsort(-1)[:, :excess]
                layer.alive.scatter_(-1, lowest, False)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object,
        scaling: float, **__: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query: [1, H, T, D]; key, value: [1, KH, T, D]. Returns [1, T, H, D]."""
        heads, new = key.shape[1:3]
        none = torch.zeros(heads, 0)
        old = self.layers.get(module.layer_idx) or Layer(
            key[0, :, :0], value[0, :, :0], none.bool(), none
        )
        alive = torch.cat([old.alive, torch.ones(heads, new, dtype=torch.bool)], 1)
        keys, values = torch.cat([old.keys, key[0]], 1), torch.cat([old.values, value[0]], 1)
        total = keys.shape[1]
        visible = torch.ones(new, total, dtype=torch.bool).tril(total - new) & alive[:, None]
        logits = torch.einsum("kgtd,ksd->kgts", query[0].unflatten(0, (heads, -1)), keys) * scaling
        prob = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        scores = pad(old.scores, (0, new)) + prob.sum((1, 2))
        self.layers[module.layer_idx] = Layer(keys, values, alive, scores)
        self.last[module.layer_idx] = prob[:, :, -1].mean(1)
        mixed = torch.einsum("kgts,ksd->tkgd", prob, values).flatten(1, 2)
        return mixed[None], None


def measure(
    reader: Reader, prompt: list[int], further: list[int], share: float
) -> dict[str, float]:
    """The figures of one text, medians over layers and KV heads; ``share`` of the prompt is kept."""
    reader.layers = {}
    reader.read(prompt)
    length, count = len(prompt), round(share * len(prompt))
    at_prompt = reader.copy()
    reader.read(further)
    full, last = reader.layers, reader.last
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    seen_by = torch.arange(length, 0, -1.0)
    for number, layer in full.items():
        so_far = at_prompt[number].scores
        later = layer.scores[:, :length] - so_far
        wanted = top(later, count)
        heavy = later.gather(1, top(so_far, count)).sum(1) / later.sum(1)
        found["held"] += heavy.tolist()
        guesses = {
            "future_h2o": so_far,
            "future_norm": so_far / seen_by,
            "future_recent": torch.arange(float(length)).expand_as(so_far),
        }
        for name, scores in guesses.items():
            found[name] += overlap(top(scores, count), wanted, length)
        found["future_chance"] += [count / length] * len(later)
        found["returns"] += [
            returns(p, v, number) for p, v in zip(last[number], layer.values, strict=True)
        ]
    reader.layers = at_prompt
    for token in further:
        reader.evict(count)
        reader.read([token])
    reader.evict(count)
    # What is not recent, in the cut cache and by the scores of full attention.
    end = length + len(further) - count // 2
    for number, layer in reader.layers.items():
        kept = layer.alive[:, :end]
        size = int(kept[0].sum())
        chosen = top(kept.float(), size)
        found["local"] += overlap(chosen, top(full[number].scores[:, :end], size), end)
    return {name: float(torch.tensor(values).median()) for name, values in found.items()}


def top(scores: Tensor, count: int) -> Tensor:
    """The highest of each head, [KH, count]."""
    return scores.topk(count, -1).indices


def overlap(chosen: Tensor, wanted: Tensor, total: int) -> list[float]:
    """Per head, what share of ``wanted`` is in ``chosen``."""
    both = [torch.zeros(len(x), total).scatter_(1, x, 1.0) for x in (chosen, wanted)]
    shares: list[float] = ((both[0] * both[1]).sum(1) / wanted.shape[1]).tolist()
    return shares


def returns(prob: Tensor, values: Tensor, seed: int) -> float:
    """How often adding a token to a set gains no less than adding it to a larger one, [S] and [S, D].

    What is gained is nearness to the full attention output of one query, over the tokens it attends to most.
    """
    places = prob.topk(CANDIDATES).indices
    weights, rows = prob[places], values[places]
    whole = (weights[:, None] * rows).sum(0) / weights.sum()

    def worth(mask: Tensor) -> Tensor:
        part = weights * mask
        mixed = part @ rows / part.sum(-1, keepdim=True).clamp_min(1e-9)
        return -(mixed - whole).norm(dim=-1)

    source = torch.Generator().manual_seed(seed)
    order = torch.rand(PAIRS, CANDIDATES, generator=source).argsort(-1).argsort(-1)
    small, large, one = (order < 3).float(), (order < 8).float(), (order == 8).float()
    gained = [worth(mask + one) - worth(mask) for mask in (small, large)]
    return float((gained[0] >= gained[1] - 1e-7).float().mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print."""
    parser = command_parser("loadtest.quality.assumptions", __doc__)
    add = parser.add_argument
    add("--model", help="a transformers model's directory; by default the embedded model")
    add("--texts", type=int, default=3, help="how many")
    add("--prompt-tokens", type=int, default=1024, help="tokens read before anything is kept")
    add("--tokens", type=int, default=256, help="tokens read after that")
    add("--budget", type=float, default=0.2, help="share of the prompt that is kept")
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    path, rows = result_path("assumptions", args.out), list[Row]()
    directory = args.model or str(default_model_dir())
    reader, tokenizer = Reader(directory), AutoTokenizer.from_pretrained(directory)
    for name, text in passages()[: args.texts]:
        tokens = tokenizer.encode(text, verbose=False)[: args.prompt_tokens + args.tokens]
        prompt, further = tokens[: args.prompt_tokens], tokens[args.prompt_tokens :]
        settings = {key: vars(args)[key] for key in ("prompt_tokens", "tokens", "budget")}
        row = describe_run("loadtest.quality.assumptions") | {"text": name} | settings
        rows.append(row | measure(reader, prompt, further, args.budget))
        append_rows(path, rows[-1:])
        print(f"{name}: done", flush=True)
    publish(path, markdown(rows))


def markdown(rows: Sequence[Row]) -> str:
    """A line per figure: the median over texts, and their range."""
    lines = [[says, median_range([row[name] for row in rows], 2)] for name, says in FIGURES.items()]
    table = markdown_table(["share", "median (range over texts)"], lines)
    return "\n".join(["# The paper's assumptions, measured", "", *provenance(rows), table, ""])


if __name__ == "__main__":
    main()
