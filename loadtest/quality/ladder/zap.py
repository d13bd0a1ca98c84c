# SPDX-License-Identifier: Apache-2.0
"""What repeating a prompt would give a token, foretold from the token alone: KVzap, arXiv 2601.07891.

One ridge regression per layer and KV head, from all of a layer's queries, keys and values of the token
(before rotation; together they tell what the layer's input was) to the logarithm of the largest attention of
a repeating query. It costs one small product per token, when the prompt is read, and no second reading.
Trained on texts that nothing else here is measured on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.prompts import around, repetition
from loadtest.quality.ladder.reading import Prompt, Reading, repeat_prompt
from loadtest.quality.ladder.regression import TINY, Regression, solve

__all__ = ["ZAP_TEXTS", "ZAP_TOKENS", "train_zap"]

ZAP_TOKENS = 1024
"""Of a text."""

ZAP_TEXTS = 2
"""Of a source."""


class Sighted(Reading):
    """Keeps what there is to foretell from."""

    def __init__(self, model: LadderModel) -> None:
        super().__init__(model)
        self.sights: dict[int, Tensor] = {}

    def foretell(self, layer: int, sight: Tensor) -> None:
        """``sight``: [T, F]."""
        self.sights[layer] = sight


def train_zap(model: LadderModel, texts: Sequence[list[int]]) -> Regression:
    """From texts, each of which is read and repeated.

    Raises:
        ValueError: there are none.
    """
    if not texts:
        raise ValueError("a zap wants texts to be trained on")
    began = time.monotonic()
    before, _ = around(model)
    sums: list[list[Tensor]] = []
    for number, text in enumerate(texts, 1):
        reading = Sighted(model)
        prompt = repeat_prompt(reading.read(before + text), repetition(model, text))
        for layer, products in enumerate(_sums(prompt, reading.sights, len(before))):
            if layer == len(sums):
                sums.append(products)
            else:
                sums[layer] = [old + more for old, more in zip(sums[layer], products, strict=True)]
        seconds = time.monotonic() - began
        print(
            f"zap: {number} of {len(texts)} texts in {seconds:.0f} s", file=sys.stderr, flush=True
        )
    solved = [solve(products[None], targets) for products, targets in sums]
    weights, mean, spread = (
        torch.stack([getattr(one, name) for one in solved])
        for name in ("weights", "mean", "spread")
    )
    return Regression(weights, mean, spread)


def _sums(prompt: Prompt, sights: dict[int, Tensor], start: int) -> list[list[Tensor]]:
    """By layer: products of features, [F + 1, F + 1], and with what repeating gave, [KH, F + 1]."""
    found = []
    for layer, most in enumerate(prompt.most):
        sight = sights[layer][start:]
        wide = torch.cat([sight, torch.ones_like(sight[:, :1])], 1).double()
        wanted = most[:, start:].clamp_min(TINY).log().double()
        found.append([wide.mT @ wide, wanted @ wide])
    return found
