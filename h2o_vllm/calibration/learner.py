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

from typing import NamedTuple

import torch
from torch import Tensor

from h2o_vllm.calibration.features import Rotation, features
from h2o_vllm.calibration.regression import Sums

CHUNK = 128
"""Queries per chunk; it limits the memory for logits."""


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
    """Adds up the examples of each request.

    Args:
        rotation: how the model rotates keys.
        text: tokens of a text. request: tokens of a request; steps of another size are ignored.
    """

    def __init__(self, layers: int, rotation: Rotation, text: int, request: int) -> None:
        self._sums = [Sums() for _ in range(layers)]
        self._rotation, self._text, self._request = rotation, text, request
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

    def weights(self) -> Tensor:
        """[L, KH, F + 1], float32, on the host.

        Raises:
            ValueError: there were no examples.
        """
        self._learn()
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
        self._sums[layer].add(known[:, 1:], wanted[:, 1:])


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
