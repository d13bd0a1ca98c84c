# SPDX-License-Identifier: Apache-2.0
r"""Learn from a model that repeats texts. Worker process; plain torch, any device.

One long request holds a text, the instruction to repeat it, and the text again::

    | text ............... | instruction | text ............... |
      the examples: each    \____ the largest attention that ____/
      token's key, value          any of these queries gives it

The target is KVzip's score (https://arxiv.org/abs/2505.23416). The whole request has to be one step, so that
its queries and keys are at hand: nothing is read from the KV cache, and nothing is evicted. If several layers
read a key, the largest attention that any of them gives it counts, as of query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_vllm.calibration.features import Rotation, features
from h2o_vllm.calibration.regression import Sums, predicted

CHUNK = 128
"""Queries per chunk; it limits the memory for logits."""

SHARES = (0.5, 0.25, 0.125)
"""Shares of a text's tokens. Predictions are judged by the attention to the best tokens of each share."""


class Softmax(NamedTuple):
    """How a layer turns products into probabilities.

    Attributes:
        scale: factor on q.k. softcap: scaled logits x become ``softcap * tanh(x / softcap)``; 0: no cap.
        sinks: [H], logits that belong to no key and join the denominator, or ``None``.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None


class Learner:
    """Adds up the examples of each request, and judges predictions with texts that it has not yet learned.

    Args:
        rotation: how the model rotates keys.
        text: tokens of a text. request: tokens of a request; steps of another size are ignored.
        judge_from: number of texts after which each further text is predicted before it is learned.
        rivals: other ways to rank tokens, by name, each a function of the keys, [KH, T, D] to [KH, T].
    """

    def __init__(
        self,
        layers: int,
        rotation: Rotation,
        text: int,
        request: int,
        judge_from: int | None = None,
        rivals: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self._sums = [Sums() for _ in range(layers)]
        self._rotation, self._text, self._request = rotation, text, request
        self._judge_from_token = None if judge_from is None else judge_from * (text - 1)
        self._rivals = {} if rivals is None else rivals
        self._judged: Tensor | None = None
        # Per way and share: the sum over heads, layers and texts, and how many there were.
        self._found: dict[str, Tensor] = {}
        self._heads = 0
        self._seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Keys and values of a layer's last step, and the largest attention to them so far."""

    @property
    def tokens(self) -> int:
        """Number of examples so far."""
        self._learn()
        return self._sums[0].tokens

    def look(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        softmax: Softmax,
    ) -> None:
        """Collect the attention of one layer in one step.

        Args:
            layer: index among the evictable layers that hold KV.
            query: [T, H, D].
            key, value: [T, KH, D], after rotation; ``None`` if the layer reads the KV of the previous call.
        """
        if len(query) != self._request:
            return
        if key is not None and value is not None:
            self._learn(layer)
            self._seen[layer] = key, value, key.new_zeros((), dtype=torch.float32)
        key, value, most = self._seen[layer]
        most = most.maximum(largest_attention(query, key, softmax, self._text))
        self._seen[layer] = key, value, most

    def found(self) -> dict[str, list[float]]:
        """The share of a text's attention to the tokens that each method ranks best, for :data:`SHARES`.

        Means over KV heads, layers and the judged texts; empty without any. ``best`` ranks by the attention
        itself.
        """
        self._learn()
        return {name: (sums / self._heads).tolist() for name, sums in self._found.items()}

    def weights(self) -> Tensor:
        """[L, KH, F + 1], float32, on the host.

        Raises:
            ValueError: there were no examples.
        """
        self._learn()
        return self._solved()

    def _solved(self) -> Tensor:
        return torch.stack([sums.solve() for sums in self._sums])

    # The tensors are from vLLM's inference mode, and callers may be outside of it.
    @torch.inference_mode()
    def _learn(self, *layers: int) -> None:
        """Learn from the last step of these layers, by default of all."""
        for layer in layers or tuple(self._seen):
            if layer in self._seen:
                self._learn_from(layer, *self._seen.pop(layer))

    def _learn_from(self, layer: int, key: Tensor, value: Tensor, wanted: Tensor) -> None:
        keys, values = (one[: self._text].transpose(0, 1) for one in (key, value))
        known = features(keys, values, self._rotation)
        # The first token gets far more attention than others (a sink), so it is no example.
        known, wanted, keys = known[:, 1:], wanted[:, 1:], keys[:, 1:]
        if layer == 0 and self._judged is None and self._sums[0].tokens == self._judge_from_token:
            # All layers have learned from the texts before this one.
            self._judged = self._solved().to(known.device)
        if self._judged is not None:
            ways = {name: way(keys) for name, way in self._rivals.items()}
            ways |= {"predicted": predicted(self._judged[layer], known), "best": wanted}
            for name, ranked in ways.items():
                self._found[name] = self._found.get(name, 0.0) + _found(ranked, wanted)
            self._heads += len(wanted)
        self._sums[layer].add(known, wanted)


def _found(ranked: Tensor, wanted: Tensor) -> Tensor:
    """The share of attention found, summed over KV heads; ``ranked``, ``wanted``: [KH, T]. Float64."""
    in_order = wanted.double().gather(1, ranked.argsort(1, descending=True)).cumsum(1)
    count = wanted.shape[1]
    last = [max(1, int(share * count)) - 1 for share in SHARES]
    return (in_order[:, last] / in_order[:, -1:]).sum(0)


def largest_attention(query: Tensor, key: Tensor, softmax: Softmax, text: int) -> Tensor:
    """The largest probability that any query after the text gives to each of its keys, [KH, text], float32.

    The maximum is also over the query heads of a KV head.

    Args:
        query: [T, H, D], of all positions. key: [T, KH, D].
    """
    tokens, heads = key.shape[:2]
    keys, every = key.float().transpose(0, 1), torch.arange(tokens, device=key.device)
    most = key.new_full((heads, text), float("-inf"), dtype=torch.float32)
    for begin in range(text, tokens, CHUNK):
        end = min(begin + CHUNK, tokens)
        q = query[begin:end].float().unflatten(1, (heads, -1)).transpose(0, 1)
        # [KH, t, G, end]
        logits = torch.einsum("ktgd,ksd->ktgs", q, keys[:, :end]) * softmax.scale
        if softmax.softcap:
            logits = softmax.softcap * (logits / softmax.softcap).tanh()
        future = every[:end] > every[begin:end, None]
        logits = logits.masked_fill(future[:, None], float("-inf"))
        total = logits.logsumexp(-1, keepdim=True)
        if softmax.sinks is not None:
            total = total.logaddexp(softmax.sinks.float().view(heads, 1, -1, 1))
        most = most.maximum((logits[..., :text] - total).amax((1, 2)))
    return most.exp()
