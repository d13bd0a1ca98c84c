# SPDX-License-Identifier: Apache-2.0
"""H2O in plain torch on a transformers model, written from the paper and not from our code.

Nothing is paged, moved or shared: every key ever computed stays in a list, and a boolean mask per
layer and KV head says which of them still exist. Imports nothing of h2o_vllm.

Paper: Zhang et al., "H2O: Heavy-Hitter Oracle", NeurIPS 2023, arXiv 2306.14048, Algorithm 1. There
one token goes for each that comes: ``block=1``. Our cadence: eviction happens in units of
``block`` tokens, before the token that would exceed the budget by a unit is computed, and the
recent window begins at the nearest block. Both can be had here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache


class States(DynamicCache):
    """Transformers' cache, of which only layers that keep a state make use: keys and values are ours."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Nothing is added to the new ones, [B, KH, T, D]."""
        return key_states, value_states


@dataclass
class LayerCache:
    """One layer that holds KV. ``keys``, ``values``: [B, KH, S, D]; ``alive``, ``scores``: [B, KH, S].

    ``window``: how many tokens a query of a sliding-window layer sees, itself included. Such a layer forgets
    by itself, and nothing is evicted from it. ``chunk``: tokens of a chunk, within which a query sees what
    came before it (Llama 4); it forgets by itself as well.
    """

    keys: Tensor
    values: Tensor
    alive: Tensor
    scores: Tensor
    window: int | None = None
    chunk: int | None = None


@dataclass
class Reference:
    """H2O on B sequences of one length, which never see each other.

    Args:
        model_dir: a transformers model whose attention goes through the attention interface.
        fraction: share of the tokens seen to keep; ``recent`` of it are the newest.
        block: tokens evicted at a time; 1 is the paper's cadence. floor: smallest budget in tokens.
        protected: first tokens, a multiple of ``block``, that are neither ranked nor counted.
    """

    model_dir: str
    fraction: float
    recent: float
    block: int
    floor: int
    protected: int = 0
    layers: dict[int, LayerCache] = field(default_factory=dict)
    states: States = field(default_factory=States)
    """Of convolution and state-space layers, which forget by themselves."""
    closest: float = math.inf
    """How near a tie the evictions came: the smallest gap between the highest score that went and the
    lowest that stayed beside it, relative to the latter, over all layers and heads."""

    def __post_init__(self) -> None:
        # One name each, so that several instances may live side by side.
        name = f"h2o_reference_{id(self)}"
        AttentionInterface.register(name, self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            self.model_dir, dtype=torch.float32, attn_implementation=name
        ).eval()

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """Greedily continues one sequence.

        Returns:
            The generated tokens and their steps' log-probabilities, [num_tokens, V]. The KV of the
            last generated token is not computed.
        """
        logits = self.read(torch.tensor([prompt]))
        tokens, logprobs = [], []
        for step in range(num_tokens):
            logprobs.append(logits[0].log_softmax(-1))
            tokens.append(int(logits.argmax()))
            if step + 1 < num_tokens:
                self._evict()
                logits = self._forward(torch.tensor([tokens[-1:]]))[:, -1]
        return tokens, torch.stack(logprobs)

    @torch.inference_mode()
    def read(self, prompts: Tensor) -> Tensor:
        """Computes prompts, [B, T], with full attention, and nothing is evicted yet.

        Returns:
            The next token's logits, [B, V].
        """
        self.layers.clear()
        self.states = States(config=self.model.config)
        self.closest = math.inf
        return self._forward(prompts)[:, -1]

    @torch.inference_mode()
    def force(self, tokens: Tensor) -> Tensor:
        """Feeds given tokens, [B, N], evicting as if they had been generated.

        Returns:
            Log-probabilities of the second token and those after it, [B, N - 1]. The KV of the
            last token is not computed.
        """
        logprobs = []
        at, end = 0, tokens.shape[1] - 1
        while at < end:
            self._evict()
            # Until something is due again, one causal pass computes what one pass each would.
            free = next((n for n in range(1, end - at) if self._excess(n) > 0), end - at)
            logits = self._forward(tokens[:, at : at + free], keep=free)
            following = tokens[:, at + 1 : at + free + 1, None]
            logprobs.append(logits.log_softmax(-1).gather(-1, following)[..., 0])
            at += free
        return torch.cat(logprobs, 1)

    def kept(self, layer: int, head: int) -> list[int]:
        """Positions of the first sequence whose KV still exists."""
        return self.layers[layer].alive[0, head].nonzero().flatten().tolist()

    @property
    def evictable(self) -> list[int]:
        """The layers with full attention."""
        return sorted(
            layer for layer, cache in self.layers.items() if cache.window is cache.chunk is None
        )

    @property
    def seen(self) -> int:
        """Tokens whose KV has been computed."""
        return self.layers[min(self.layers)].alive.shape[-1]

    @property
    def held(self) -> int:
        """Tokens whose KV still exists: as many in every sequence, evictable layer and head."""
        return int(self.layers[self.evictable[0]].alive[0, 0].sum())

    @property
    def recent_from(self) -> int:
        """The position at which the recent window begins."""
        unit = self.block
        exact = self.seen - round(self.recent * self._budget(self.seen - self.protected))
        return min((exact + unit // 2) // unit, self.seen // unit) * unit

    def _budget(self, rest: int) -> int:
        return min(rest, max(self.floor, math.ceil(round(self.fraction * rest, 6))))

    def _excess(self, more: int = 0) -> int:
        """Tokens to evict once ``more`` have been computed."""
        held, rest = self.held + more - self.protected, self.seen + more - self.protected
        return (held - self._budget(rest)) // self.block * self.block

    def _evict(self) -> None:
        excess, recent_from = self._excess(), self.recent_from
        if excess <= 0:
            return
        for layer in self.evictable:
            cache = self.layers[layer]
            candidate = cache.alive.clone()
            candidate[..., : self.protected] = False
            candidate[..., recent_from:] = False
            scores = cache.scores.masked_fill(~candidate, float("inf"))
            ranked, order = scores.sort(dim=-1, stable=True)
            cache.alive.scatter_(-1, order[..., :excess], False)
            gone, spared = ranked[..., excess - 1], ranked[..., excess]
            self.closest = min(
                self.closest, float(((spared - gone) / spared).nan_to_num(1.0).min())
            )

    def _forward(self, tokens: Tensor, keep: int = 1) -> Tensor:
        """Logits of the last ``keep`` of new tokens, [B, T]."""
        position = self.seen if self.layers else 0
        positions = torch.arange(position, position + tokens.shape[1])[None].expand_as(tokens)
        output = self.model(
            input_ids=tokens, position_ids=positions, past_key_values=self.states,
            use_cache=True, logits_to_keep=keep,
        )  # fmt: skip
        return output.logits.float()

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object,
        scaling: float, sliding_window: int | None = None, softcap: float | None = None,
        s_aux: Tensor | None = None, **__: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query: [B, H, T, D]; key, value: [B, KH, T, D], rotated. Returns [B, T, H, D].

        ``softcap`` is Gemma 2's; ``s_aux`` [H] are gpt-oss' sinks, a logit per q head that nobody has.
        """
        if (
            sliding_window is not None
            and sliding_window >= self.model.config.max_position_embeddings
        ):
            # No sequence leaves it.
            sliding_window = None
        chunk = self._chunk(module)
        sequences, heads, new = key.shape[:3]
        nothing = torch.zeros(sequences, heads, 0)
        owner = kv_owner(module)
        cache = self.layers.setdefault(
            owner,
            LayerCache(
                key[:, :, :0], value[:, :, :0], nothing.bool(), nothing, sliding_window, chunk
            ),
        )
        if owner == module.layer_idx:
            alive = torch.ones(sequences, heads, new, dtype=torch.bool)
            cache.keys = torch.cat([cache.keys, key], 2)
            cache.values = torch.cat([cache.values, value], 2)
            cache.alive = torch.cat([cache.alive, alive], 2)
            cache.scores = torch.cat([cache.scores, torch.zeros(sequences, heads, new)], 2)
        total = cache.keys.shape[2]
        grouped = query.unflatten(1, (heads, -1))
        logits = torch.einsum("bkgtd,bksd->bkgts", grouped, cache.keys) * scaling
        causal = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        if sliding_window is not None:
            causal = causal.triu(total - new - sliding_window + 1)
        if chunk is not None:
            chunks = torch.arange(total) // chunk
            causal = causal & (chunks[-new:, None] == chunks)
        visible = causal & cache.alive[:, :, None]
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible[:, :, None], float("-inf"))
        if s_aux is not None:
            aside = s_aux.detach().view(1, heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, aside], -1)
        prob = logits.softmax(-1)[..., :total]
        # A token is worth what all layers that read its KV give to it.
        cache.scores += prob.sum((2, 3))
        mixed = torch.einsum("bkgts,bksd->bkgtd", prob, cache.values)
        return mixed.flatten(1, 2).transpose(1, 2).contiguous(), None

    def _chunk(self, module: Any) -> int | None:
        """How many tokens a chunk of this layer has, if it attends in chunks."""
        kinds = getattr(module.config, "layer_types", None) or []
        if "chunked_attention" not in kinds[module.layer_idx : module.layer_idx + 1]:
            return None
        size: int = module.config.attention_chunk_size
        return size


def kv_owner(module: Any) -> int:
    """The layer whose keys and values this layer's queries see: its own, or that of an earlier layer.

    Gemma 3n, Gemma 4 E: the last ``num_kv_shared_layers`` layers read those of the last layer before them
    that is of their kind.
    """
    layer: int = module.layer_idx
    if not getattr(module, "is_kv_shared_layer", False):
        return layer
    config, kinds = module.config, module.config.layer_types
    own = config.num_hidden_layers - config.num_kv_shared_layers
    return max(other for other in range(own) if kinds[other] == kinds[layer])
