# SPDX-License-Identifier: Apache-2.0
"""H2O in plain torch on a transformers model, written from the paper and not from our code.

Nothing is paged, moved or shared: every key ever computed stays in a list, and a boolean mask per
layer and KV head says which of them still exist. Imports nothing of h2o_vllm.

Paper: Zhang et al., "H2O: Heavy-Hitter Oracle", NeurIPS 2023, arXiv 2306.14048, Algorithm 1. The
cadence is ours: eviction happens in units of ``block`` tokens, before the token that would
exceed the budget by a unit is computed, and the recent window is rounded up to whole blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM


@dataclass
class LayerCache:
    """One layer. ``keys``, ``values``: [KH, S, D]; ``alive``: [KH, S]; ``scores``: [KH, S]."""

    keys: Tensor
    values: Tensor
    alive: Tensor
    scores: Tensor


@dataclass
class Reference:
    """Greedy H2O generation of one sequence.

    Args:
        model_dir: a transformers model whose attention goes through the attention interface.
        fraction: share of the tokens seen to keep; ``recent`` of it are the newest.
        block: tokens evicted at a time. floor: smallest budget in tokens.
    """

    model_dir: str
    fraction: float
    recent: float
    block: int
    floor: int
    layers: dict[int, LayerCache] = field(default_factory=dict)

    def __post_init__(self) -> None:
        AttentionInterface.register("h2o_reference", self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            self.model_dir, dtype=torch.float32, attn_implementation="h2o_reference"
        ).eval()

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """Returns the generated tokens and their steps' log-probabilities, [num_tokens, V].

        The KV of the last generated token is not computed.
        """
        self.layers.clear()
        logits = self._forward(prompt, 0)
        tokens, logprobs = [], []
        for step in range(num_tokens):
            logprobs.append(logits.log_softmax(-1))
            tokens.append(int(logits.argmax()))
            if step + 1 < num_tokens:
                seen = len(prompt) + step
                self._evict(seen)
                logits = self._forward([tokens[-1]], seen)
        return tokens, torch.stack(logprobs)

    def kept(self, layer: int, head: int) -> list[int]:
        """Positions whose KV still exists."""
        return self.layers[layer].alive[head].nonzero().flatten().tolist()

    def _evict(self, seen: int) -> None:
        budget = min(seen, max(self.floor, math.ceil(round(self.fraction * seen, 6))))
        protected = (seen - round(self.recent * budget)) // self.block * self.block
        for cache in self.layers.values():
            for head in range(cache.alive.shape[0]):
                alive = cache.alive[head]
                excess = (int(alive.sum()) - budget) // self.block * self.block
                if excess <= 0:
                    continue
                scores = cache.scores[head].tolist()
                old = [p for p in alive.nonzero().flatten().tolist() if p < protected]
                old.sort(key=scores.__getitem__)
                alive[old[:excess]] = False

    def _forward(self, tokens: list[int], position: int) -> Tensor:
        positions = torch.arange(position, position + len(tokens))[None]
        output = self.model(
            input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False
        )
        return output.logits[0, -1].float()

    def _attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object,
        scaling: float, **__: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query: [1, H, T, D]; key, value: [1, KH, T, D], rotated. Returns [1, T, H, D]."""
        heads, new = key.shape[1], key.shape[2]
        nothing = torch.zeros(heads, 0)
        cache = self.layers.setdefault(
            module.layer_idx,
            LayerCache(key[0][:, :0], value[0][:, :0], nothing.bool(), nothing),
        )
        cache.keys = torch.cat([cache.keys, key[0]], 1)
        cache.values = torch.cat([cache.values, value[0]], 1)
        cache.alive = torch.cat([cache.alive, torch.ones(heads, new, dtype=torch.bool)], 1)
        cache.scores = torch.cat([cache.scores, torch.zeros(heads, new)], 1)
        total = cache.keys.shape[1]
        grouped = query[0].unflatten(0, (heads, -1))
        logits = torch.einsum("kgtd,ksd->kgts", grouped, cache.keys) * scaling
        visible = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        visible = visible[None] & cache.alive[:, None]
        prob = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        cache.scores += prob.sum((1, 2))
        mixed = torch.einsum("kgts,ksd->kgtd", prob, cache.values)
        return mixed.flatten(0, 1).transpose(0, 1)[None].contiguous(), None
