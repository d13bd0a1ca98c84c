# SPDX-License-Identifier: Apache-2.0
"""A learned score: what a token will get, by ridge regression from what is known of it when it is ranked.

One regression per layer and KV head, from a token's key (before rotation), its value, its age and the
attention it has had per query, to the logarithm of the attention per query that it gets in the next tokens.
Trained on texts that nothing else here is measured on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from h2o_vllm.calibration.regression import TINY, Sums
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.reading import Prompt, half_turned, read_prompt

__all__ = ["features", "train"]

STEP, AHEAD = 256, 2
"""Texts are cut every so many tokens; the future is so many steps."""

CUTS = 6
"""Steps of a text; the first two are followed by too short a past, the last two by too short a future."""


def features(
    model: LadderModel, keys: Tensor, values: Tensor, per_query: Tensor, start: int, seen: int
) -> Tensor:
    """What is known of the tokens from position ``start`` on once ``seen`` tokens exist, [KH, n, 2 * D + 3].

    Args:
        keys, values: [KH, n, D], rotated. per_query: [KH, n], attention per query so far.
    """
    count = keys.shape[1]
    cos, sin = model.rotation(start, start + count)
    keys, values = keys.float(), values.float()
    plain = keys * cos - half_turned(keys) * sin
    ages = torch.log(seen - torch.arange(start, start + count, dtype=torch.float32))
    known = torch.stack([per_query.clamp_min(TINY).log(), ages.expand_as(per_query)], -1)
    lengths = values.norm(dim=-1, keepdim=True).clamp_min(TINY).log()
    return torch.cat([plain, values, known, lengths], -1)


def train(model: LadderModel, texts: Sequence[list[int]]) -> Tensor:
    """Weights, [L, KH, F + 1], from texts of at least ``STEP * CUTS`` tokens.

    Raises:
        ValueError: there are none.
    """
    began = time.monotonic()
    sums: list[Sums] = []
    for text in texts:
        for layer, given, wanted in _examples(model, text):
            if layer == len(sums):
                sums.append(Sums())
            sums[layer].add(given, wanted)
    if not sums:
        raise ValueError("a gate wants texts to be trained on")
    solved = torch.stack([layer.solve() for layer in sums])
    seconds = time.monotonic() - began
    print(f"gate: {len(texts)} texts in {seconds:.0f} s", file=sys.stderr, flush=True)
    return solved


def _examples(model: LadderModel, text: list[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Layer, features [KH, n, F] and what followed, [KH, n]."""
    parts = [text[STEP * i : STEP * (i + 1)] for i in range(CUTS)]
    if len(parts[-1]) < STEP:
        return
    read = read_prompt(model, parts)
    for now in range(AHEAD - 1, CUTS - AHEAD):
        for layer in range(len(read[now].layers)):
            yield layer, _known(read[now], layer), _future(read[now], read[now + AHEAD], layer)


def _known(prompt: Prompt, layer: int) -> Tensor:
    kv, seen = prompt.layers[layer], prompt.tokens
    per_query = prompt.notes[layer].total / (seen - torch.arange(seen))
    return features(prompt.model, kv.keys, kv.values, per_query, 0, seen)


def _future(now: Prompt, later: Prompt, layer: int) -> Tensor:
    got = later.notes[layer].total[:, : now.tokens] - now.notes[layer].total
    return got / (later.tokens - now.tokens)
