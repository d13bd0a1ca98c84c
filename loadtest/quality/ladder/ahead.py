# SPDX-License-Identifier: Apache-2.0
"""Queries of tokens to come, before they come: what stands behind a prompt looks at it, and is forgotten.

``draft``: what the model says next, with all of the KV (Lookahead Q-Cache, arXiv 2505.20334, which drafts
from an evicted cache: this is the best that it can be). ``pseudo``: any tokens, here the prompt's first, at
the positions to come, for queries are more of a place than of a word (DapQ, arXiv 2603.11564).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from loadtest.quality.ladder.answers import Answering
from loadtest.quality.ladder.reading import Prompt, repeat_prompt

__all__ = ["AHEAD", "look_ahead"]

AHEAD = 32
"""Tokens of a draft, and pseudo tokens."""


def look_ahead(
    prompt: Prompt, names: Collection[str], first: list[int], opening: list[int]
) -> Prompt:
    """The prompt with what tokens ahead of it give to it.

    Args:
        names: ``draft``, ``pseudo`` or both. first: the prompt's first tokens.
        opening: what is known to follow, and is read before a draft; at least one token.
    """
    tokens = {"pseudo": first[:AHEAD]}
    if "draft" in names:
        tokens["draft"] = opening + _draft(prompt, opening)
    ahead = {name: repeat_prompt(prompt, tokens[name]).sums for name in names}
    return replace(prompt, ahead=prompt.ahead | ahead)


def _draft(prompt: Prompt, opening: list[int]) -> list[int]:
    """What the model says behind prompt and opening, greedily."""
    heads = prompt.layers[0].keys.shape[0]
    everyone = torch.ones(len(prompt.layers), 1, heads, prompt.tokens, dtype=torch.bool)
    stage, position = Answering(prompt.layers, everyone), prompt.tokens
    unread, said = opening, list[int]()
    while len(said) < AHEAD:
        logits = prompt.model.forward(stage, torch.tensor([unread]), position)
        position += len(unread)
        unread = [int(logits[0, -1].argmax())]
        said += unread
    return said
