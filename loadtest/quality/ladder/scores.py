# SPDX-License-Identifier: Apache-2.0
"""What each score thinks of a prompt's tokens: formulas over what reading noted. High is kept.

The first group is ours, by the formulas of ``tests/reference/scores.py``; they rank the tokens before the
recent ones. The second is kvpress', by the formulas of ``kvpress/presses`` at 0.5.4, with its settings; they
rank all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, cosine_similarity, normalize, pad

from h2o_vllm.calibration.regression import foretold
from loadtest.quality.ladder.gate import features
from loadtest.quality.ladder.reading import TAIL, Prompt, half_turned

__all__ = [
    "GATED",
    "LOOKING",
    "MIXED",
    "PRESSES",
    "REPEATING",
    "SCORES",
    "ZAPPED",
    "mixed",
    "plain_scores",
    "pooled",
    "scores_of",
    "shares_of",
    "window_scores",
]

MIXED = "/"
"""Between scores that become one, in the units of the first."""

LESS = "*"
"""Before a number, behind one of these but the first: its ranks count so much less."""

WINDOW, KERNEL = 32, 7
"""SnapKV's as h2o_vllm has it."""

NEARER, BEHIND = 2.0**-18, 2.0**-20
"""What parts tokens that one score stands for, as h2o_vllm has it."""

PRESS_WINDOW, PRESS_KERNEL = TAIL, 5
"""SnapKV's as kvpress has it."""

FIRST = 32
"""Tokens of the first block, which ``window`` keeps."""

PRESS_SINKS = 4
FUTURE = 512
"""Positions that Expected Attention looks ahead."""

Score = Callable[[Prompt, int, int], Tensor]
"""Of a layer's tokens before ``until``, [KH, until]."""


def scores_of(name: str, prompt: Prompt, until: int, seed: int = 0) -> Tensor:
    """[L, KH, until], float32.

    Raises:
        KeyError: there is no such score.
    """
    if name == "random":
        generator = torch.Generator().manual_seed(seed)
        heads = prompt.layers[0].keys.shape[0]
        return torch.rand(len(prompt.layers), heads, until, generator=generator)
    if MIXED in name:
        ways = [scores_of(one, prompt, until) for one in plain_scores(name)]
        return mixed(*ways, shares=shares_of(name))
    formula = (SCORES | PRESSES)[name]
    return torch.stack([formula(prompt, layer, until) for layer in range(len(prompt.layers))])


def plain_scores(name: str) -> list[str]:
    """What a score is made of: itself, or those that it mixes."""
    return [one.partition(LESS)[0] for one in name.split(MIXED)]


def shares_of(name: str) -> list[int]:
    """Of each of those but the first, by how much its ranks count less."""
    return [int(one.partition(LESS)[2] or 1) for one in name.split(MIXED)[1:]]


def mixed(first: Tensor, *others: Tensor, shares: Sequence[int] = ()) -> Tensor:
    """The largest of a token's first score and the first scores of whoever has its rank in the others.

    The order is that of the best of a token's ranks, at one rank that of the ways; but the scores are like
    the first ones, so that what attention gives later can be added to them. [..., U] each.

    Args:
        shares: of the others, by which numbers their ranks are multiplied; by default 1.
    """
    values, best = first.sort(dim=-1, descending=True).values, first
    places, last = torch.arange(values.shape[-1]), values.shape[-1] - 1
    for way, (other, share) in enumerate(zip_longest(others, shares, fillvalue=1), 1):
        assert isinstance(other, Tensor)
        order = other.sort(dim=-1, descending=True, stable=True).indices
        given = values[..., (places * share).clamp_max(last)] * (1 - way * BEHIND)
        best = torch.maximum(best, torch.empty_like(first).scatter_(-1, order, given))
    return best


def _h2o(prompt: Prompt, layer: int, until: int) -> Tensor:
    return prompt.notes[layer].total[:, :until]


def _h2o_norm(prompt: Prompt, layer: int, until: int) -> Tensor:
    return _h2o(prompt, layer, until) / (prompt.tokens - torch.arange(until))


def _caote(prompt: Prompt, layer: int, until: int) -> Tensor:
    return _h2o_norm(prompt, layer, until) * _distances(prompt, layer, until)


def _distances(prompt: Prompt, layer: int, until: int) -> Tensor:
    values = prompt.layers[layer].values[:, :until].float()
    distances = (values - values.mean(1, keepdim=True)).norm(dim=2)
    return distances / distances.mean(1, keepdim=True)


def _gate(prompt: Prompt, layer: int, until: int) -> Tensor:
    kv, gate = prompt.layers[layer], prompt.model.gate
    assert gate is not None
    known = (kv.keys[:, :until], kv.values[:, :until], _h2o_norm(prompt, layer, until))
    return foretold(gate[layer], features(prompt.model, *known, 0, prompt.tokens))


def _gate_caote(prompt: Prompt, layer: int, until: int) -> Tensor:
    return _gate(prompt, layer, until) * _distances(prompt, layer, until)


def _snapkv(prompt: Prompt, layer: int, until: int) -> Tensor:
    return pooled(prompt.notes[layer].tail[:, -WINDOW:, :until].sum(1))


def _snapkv_most(prompt: Prompt, layer: int, until: int) -> Tensor:
    return pooled(prompt.notes[layer].tail[:, -WINDOW:, :until].amax(1))


def _draft(prompt: Prompt, layer: int, until: int) -> Tensor:
    return pooled(prompt.ahead["draft"][layer][:, :until])


def _pseudo(prompt: Prompt, layer: int, until: int) -> Tensor:
    return pooled(prompt.ahead["pseudo"][layer][:, :until])


def pooled(sums: Tensor) -> Tensor:
    """SnapKV's, of neighbours, [KH, U]."""
    reach = KERNEL // 2
    steps = torch.tensor([2 * abs(away) - (away < 0) for away in range(-reach, reach + 1)])
    around = pad(sums, (reach, reach), value=-torch.inf).unfold(-1, KERNEL, 1)
    return (around * (1 - steps * NEARER)).amax(-1)


def _tova(prompt: Prompt, layer: int, until: int) -> Tensor:
    return prompt.notes[layer].tail[:, -1, :until]


def _keydiff(prompt: Prompt, layer: int, until: int) -> Tensor:
    keys = normalize(prompt.layers[layer].keys[:, :until].float(), dim=-1)
    return -cosine_similarity(keys, keys.mean(1, keepdim=True), dim=-1)


def _repeat(prompt: Prompt, layer: int, until: int) -> Tensor:
    return _padded(prompt.most[layer], until)


def _repeat_sum(prompt: Prompt, layer: int, until: int) -> Tensor:
    return _padded(prompt.sums[layer], until)


def _zap(prompt: Prompt, layer: int, until: int) -> Tensor:
    kv, zap = prompt.layers[layer], prompt.model.zap
    assert zap is not None
    return zap.scores(layer, kv.keys[:, :until], kv.values[:, :until])


def _window(prompt: Prompt, layer: int, until: int) -> Tensor:
    return window_scores(until).expand(prompt.layers[layer].keys.shape[0], until)


def _press_snapkv(prompt: Prompt, layer: int, until: int) -> Tensor:
    old = prompt.tokens - PRESS_WINDOW
    sums = prompt.notes[layer].tail[:, -PRESS_WINDOW:, :old].sum(1)
    pooled = avg_pool1d(sums, PRESS_KERNEL, stride=1, padding=PRESS_KERNEL // 2)
    return torch.cat([pooled, torch.full((len(sums), PRESS_WINDOW), torch.inf)], 1)[:, :until]


def _press_expected(prompt: Prompt, layer: int, until: int) -> Tensor:
    notes, kv = prompt.notes[layer], prompt.layers[layer]
    heads, size = kv.keys.shape[0], kv.keys.shape[2]
    mean = notes.first / notes.moments
    spread = notes.second / notes.moments - mean[:, :, None] * mean[:, None]
    # The rotation of the positions to come, on average: rows of the identity, rotated.
    cos, sin = prompt.model.rotation(prompt.tokens, prompt.tokens + FUTURE)
    unit = torch.eye(size)
    turn = (unit * cos.mean(0) + half_turned(unit) * sin.mean(0)).mT
    mean, spread = mean @ turn.mT, turn @ spread @ turn.mT
    keys = kv.keys[:, PRESS_SINKS:until].float()
    mean, spread = mean.unflatten(0, (heads, -1)), spread.unflatten(0, (heads, -1))
    wide = keys[:, None]
    logits = (wide @ mean[..., None])[..., 0] / size**0.5
    logits += ((wide @ spread) * wide).sum(-1) / (2 * size)
    scores = logits.softmax(-1).mean(1) * kv.values[:, PRESS_SINKS:until].float().norm(dim=-1)
    return torch.cat([torch.full((heads, PRESS_SINKS), torch.inf), scores], 1)


def _press_kvzip(prompt: Prompt, layer: int, until: int) -> Tensor:
    scores = _padded(prompt.most[layer], until).clone()
    scores[:, :PRESS_SINKS] = 1.0
    return scores


def window_scores(until: int) -> Tensor:
    """StreamingLLM's, as h2o_vllm has it: the first block, then the newest tokens."""
    places = torch.arange(until, dtype=torch.float32)
    return places.masked_fill(places < FIRST, float("inf"))


def _padded(scores: Tensor, until: int) -> Tensor:
    """Tokens behind what was repeated are a question's: they stay."""
    missing = max(0, until - scores.shape[1])
    return torch.nn.functional.pad(scores[:, :until], (0, missing), value=torch.inf)


SCORES: dict[str, Score] = {
    "h2o": _h2o,
    "h2o-norm": _h2o_norm,
    "caote": _caote,
    "gate": _gate,
    "gate-caote": _gate_caote,
    "snapkv": _snapkv,
    "snapkv-most": _snapkv_most,
    "draft": _draft,
    "pseudo": _pseudo,
    "tova": _tova,
    "keydiff": _keydiff,
    "repeat": _repeat,
    "repeat-sum": _repeat_sum,
    "zap": _zap,
    "window": _window,
}
"""Ours, with ``random``."""

PRESSES: dict[str, Score] = {
    "ObservedAttention": _h2o_norm,
    "SnapKV": _press_snapkv,
    "KeyDiff": _keydiff,
    "ExpectedAttention": _press_expected,
    "KVzip": _press_kvzip,
}
"""kvpress', as controls."""

GATED = frozenset({"gate", "gate-caote"})
"""Those for which a :mod:`.gate` has to be trained."""

ZAPPED = frozenset({"zap"})
"""Those for which the model has to be calibrated."""

LOOKING = frozenset({"draft", "pseudo"})
"""Those that want a look ahead, a forward pass for each token of a draft and one for all pseudo tokens."""

REPEATING = frozenset({"repeat", "repeat-sum", "KVzip"})
"""Those for which the prompt has to be repeated, which takes as long as reading it."""
