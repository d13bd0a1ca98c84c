# SPDX-License-Identifier: Apache-2.0
"""Every policy that keeps single tokens, H2O first, in plain torch on a transformers model.

Written from the papers and not from our code: nothing is paged, moved, shared, accumulated or rescored. Every
key ever computed stays, and a mask per layer and KV head says which of them still exist. Each query's
probabilities are kept as a row, and a policy is one formula over them (``scores.py``). Imports nothing of
h2o_vllm.

H2O: Zhang et al., "H2O: Heavy-Hitter Oracle", NeurIPS 2023, arXiv 2306.14048, Algorithm 1. There one token
goes for each that comes: ``block=1``. The engine's cadence can be had as well: whole blocks of tokens go,
before the token that would exceed the budget by a block is computed, and the recent window begins at the
nearest full block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from tests.reference.layer import Layer, kv_owner, note_margins
from tests.reference.scores import ReferenceScores

NAME = "policy_reference"
"""Of the attention of loaded models."""


class States(DynamicCache):
    """Transformers' cache, of which only layers that keep a state make use: keys and values are ours."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Nothing is added to the new ones, [B, KH, T, D]."""
        return key_states, value_states


@dataclass
class PolicyModel:
    """Greedy generation of one sequence under a policy.

    Args:
        model: a transformers model whose attention is :meth:`attend`; see :func:`load`.
        policy: value of ``kv_policy``.
        fraction: share of the tokens seen to keep; ``recent`` of it are the newest.
        block: tokens evicted at a time; 1 is the paper's cadence. floor: smallest budget in tokens.
        protected: first tokens beside the budget, rounded up to blocks.
        ends: whether the prompt's end is protected, too: at most half of the budget.
        delay: generated tokens before the first eviction.
        shared: whether the heads of a layer share what they keep beside the newest tokens, in whole blocks.
        bound: unprotected tokens, whole blocks, that a longer prompt may hold while it is computed: a quarter
            of them goes whenever there are as many; 0: no bound.
        calibration: for policies that predict, [L, KH, F + 1].
    """

    model: torch.nn.Module
    policy: str
    fraction: float
    recent: float
    block: int
    floor: int
    protected: int = 0
    ends: bool = False
    delay: int = 0
    bound: int = 0
    shared: bool = False
    calibration: Tensor | None = None
    running: ClassVar[PolicyModel | None] = None
    """Whose turn it is: the model is shared."""
    layers: dict[int, Layer] = field(default_factory=dict)
    """Those with KV that is evicted, by their number in the model."""
    others: dict[int, Layer] = field(default_factory=dict)
    """Those with a sliding window or chunks, which forget by themselves."""
    states: States = field(default_factory=States)
    """Of convolution and state-space layers, which do as well."""
    prompt: int = 0
    before: int = 0
    """Tokens of one head in slots before the protected end that have been ranked: as long as there are some,
    of those behind it as many are ranked at a time as go."""
    evicted: int = 0
    ranked: list[tuple[int, int, int]] = field(default_factory=list)
    """Per eviction: tokens seen, and the positions that it ranked for the first time, from .. to."""

    def __post_init__(self) -> None:
        self.protected = math.ceil(self.protected / self.block) * self.block

    @torch.inference_mode()
    def generate(
        self, prompt: list[int], num_tokens: int, given: list[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """The generated tokens and their log-probabilities, [num_tokens, V].

        The KV of the last generated token is not computed. With ``given`` tokens these are read instead.
        """
        PolicyModel.running, self.states = self, States(config=self.model.config)
        self.prompt = len(prompt)
        logits, tokens, logprobs = self._read(prompt), [], []
        for step in range(num_tokens):
            logprobs.append(logits.log_softmax(-1))
            tokens.append(int(logits.argmax()) if given is None else given[step])
            if step + 1 < num_tokens:
                self._evict(len(prompt) + step)
                logits = self._forward([tokens[-1]], len(prompt) + step)
        return tokens, torch.stack(logprobs)

    def kept(self, layer: int, head: int) -> list[int]:
        """Positions whose KV still exists."""
        return self.layers[layer].alive[head].nonzero().flatten().tolist()

    def scores(self, layer: int) -> Tensor:
        """What the policy thinks of each token, [KH, S]."""
        formula = ReferenceScores(self.policy, self.protected, self.prompt, self.ranked)
        return formula.of(self.layers[layer])

    @property
    def seen(self) -> int:
        """Tokens whose KV has been computed."""
        return next(iter(self.layers.values())).alive.shape[1]

    @property
    def held(self) -> int:
        """Tokens whose KV still exists; as many in every layer and head, unless heads share."""
        return int(next(iter(self.layers.values())).alive[0].sum())

    def _read(self, prompt: list[int]) -> Tensor:
        """Computes the prompt, within its bound; returns the next token's logits, [V]."""
        start = 0
        for point in self._points():
            self._forward(prompt[start:point], start)
            self._evict(point)
            start = point
        return self._forward(prompt[start:], start)

    def _points(self) -> range:
        """Tokens seen at each eviction inside of the prompt."""
        if not self.bound:
            return range(0)
        return range(self.protected + self.bound, self.prompt, self._quarter)

    @property
    def _quarter(self) -> int:
        return self.bound // 4 // self.block * self.block

    def _evict(self, seen: int) -> None:
        inside = seen in self._points()
        if not inside and seen < self.prompt + self.delay:
            return
        rest, ends = max(0, seen - self.protected), len(self.end)
        budget = min(rest, max(self.floor, math.ceil(round(self.fraction * rest, 6))))
        if inside:
            budget, ends = self.bound - self._quarter, 0
        excess = (rest - self.evicted - budget) // self.block * self.block
        if excess <= 0:
            return
        exact = seen - round(self.recent * (budget - ends))
        until = min((exact + self.block // 2) // self.block, seen // self.block) * self.block
        least = self.evicted + excess + self.protected
        until = max(until, least + len(self.end) * (least > self.end.start))
        fresh = max((end for _, _, end in self.ranked), default=self.protected)
        if self.end:
            fresh, until = self._beside_the_end(fresh, until, excess)
        self.ranked.append((seen, fresh, max(fresh, until)))
        # Of equal scores, those survive that are not copied: see h2o_vllm/kernels/reference.py.
        copied = self.protected + excess if len(self.ranked) == 1 else 0
        for number, layer in self.layers.items():
            ranks = self.scores(number).tolist()
            candidates = []
            for head, scores in enumerate(ranks):
                alive = layer.alive[head].nonzero().flatten().tolist()
                old = [p for p in alive if self.protected <= p < until and p not in self.end]
                ranked = partial(_survival, scores=scores, copied=copied)
                candidates.append(sorted(old, key=ranked))
            kept = [len(old) - excess for old in candidates]
            if self.shared and any(kept):
                kept = self._shares(ranks, candidates, sum(kept))
            layer.margins = layer.margins or [{} for _ in ranks]
            for head, (old, count) in enumerate(zip(candidates, kept, strict=True)):
                layer.alive[head, old[count:]] = False
                together = None if layer.ranks is None else layer.ranks[head].tolist()
                note_margins(layer.margins[head], ranks[head], together, old, count)
        self.evicted += excess

    @property
    def end(self) -> range:
        """The protected end, whole blocks."""
        if not self.ends:
            return range(0)
        half = min(self.prompt, max(self.floor, math.ceil(self.fraction * self.prompt))) // 2
        most = min(half, 4 * self.floor - 1)
        if self.bound:
            most = min(most, self.bound // 2)
        stop = math.ceil(self.prompt / self.block) * self.block
        return range(stop - most // self.block * self.block, stop)

    def _beside_the_end(self, fresh: int, until: int, excess: int) -> tuple[int, int]:
        """Which tokens are ranked for the first time, from .. to, all on one side of the protected end."""
        start, stop = self.end.start, self.end.stop
        before = self.before + max(0, min(until, start) - fresh)
        if not before:
            return max(fresh, stop), until
        if not self.ranked or until <= stop:
            assert self.ranked or excess < before, "no test is of that"
            self.before = before - excess
            return fresh, min(until, start)
        assert fresh >= start, "no test is of that"
        fresh = max(fresh, stop)
        until = min(until, fresh + excess)
        self.before = before - (excess - (until - fresh))
        return fresh, until

    def _shares(
        self, scores: list[list[float]], candidates: list[list[int]], room: int
    ) -> list[int]:
        """How many of its candidates, best first, each head keeps of ``room`` for all, whole blocks.

        As many blocks of the layer's best tokens as fall to it, rounded so that the largest remainders come
        first; but one at least.
        """
        best = sorted(
            (-scores[head][position], head, place)
            for head, mine in enumerate(candidates)
            for place, position in enumerate(mine)
        )[:room]
        heads, claims = len(candidates), []
        for head in range(heads):
            wanted = sum(one[1] == head for one in best)
            claims += [(blocks * self.block - wanted, head) for blocks in range(1, room)]
        more = [head for _, head in sorted(claims)[: room // self.block - heads]]
        return [(1 + more.count(head)) * self.block for head in range(heads)]

    def _forward(self, tokens: list[int], position: int) -> Tensor:
        output = self.model(
            input_ids=torch.tensor([tokens]), past_key_values=self.states, use_cache=True,
            logits_to_keep=1, **self._inputs(tokens, position),
        )  # fmt: skip
        return output.logits[0, -1].float()

    def _inputs(self, tokens: list[int], position: int) -> dict[str, Tensor]:
        """What else the model is given with tokens from ``position`` on."""
        return {"position_ids": torch.arange(position, position + len(tokens))[None]}

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float,
        window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query: [1, H, T, D]; key, value: [1, KH, T, D], rotated. Returns [1, T, H, D].

        ``window``: how many tokens a query sees, itself included; ``None``: all. ``softcap`` is Gemma 2's;
        ``sinks`` [H] are gpt-oss', a logit per q head that belongs to no key.
        """
        if window is not None and window >= module.config.max_position_embeddings:
            # No sequence leaves it.
            window = None
        chunk = _chunk(module)
        heads, new = key.shape[1], key.shape[2]
        nothing = torch.zeros(heads, 0)
        owner = kv_owner(module)
        layer = (self.layers if window is chunk is None else self.others).setdefault(
            owner, Layer(key[0][:, :0], value[0][:, :0], nothing.bool(), [])
        )
        if self.calibration is not None:
            layer.calibration = self.calibration[owner]
        if owner == module.layer_idx:
            layer.keys = torch.cat([layer.keys, key[0]], 1)
            layer.values = torch.cat([layer.values, value[0]], 1)
            layer.alive = torch.cat([layer.alive, torch.ones(heads, new, dtype=torch.bool)], 1)
            layer.seen.append(torch.zeros(heads, new, layer.keys.shape[1]))
        total = layer.keys.shape[1]
        logits = query[0].unflatten(0, (heads, -1)) @ layer.keys[:, None].mT * scaling
        visible = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        if window is not None:
            visible = visible.triu(total - new - window + 1)
        if chunk is not None:
            chunks = torch.arange(total) // chunk
            visible = visible & (chunks[-new:, None] == chunks)
        visible = visible[None] & layer.alive[:, None]
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~visible[:, None], float("-inf"))
        if sinks is not None:
            aside = sinks.detach().view(heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, aside], -1)
        prob = logits.softmax(-1)[..., :total]
        # All layers that read a key give it attention.
        layer.seen[-1] = layer.seen[-1] + prob.sum(1)
        mixed = prob @ layer.values[:, None]
        return mixed.flatten(0, 1).transpose(0, 1)[None].contiguous(), None


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object,
    scaling: float, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **__: object,
) -> tuple[Tensor, None]:  # fmt: skip
    assert PolicyModel.running is not None
    softmax = (sliding_window, softcap, s_aux)
    return PolicyModel.running.attend(module, query, key, value, scaling, *softmax)


def _chunk(module: Any) -> int | None:
    """How many tokens a chunk has, within which a query of this layer sees what came before (Llama 4)."""
    kinds = getattr(module.config, "layer_types", None) or []
    if "chunked_attention" not in kinds[module.layer_idx : module.layer_idx + 1]:
        return None
    return module.config.attention_chunk_size


def _survival(position: int, *, scores: list[float], copied: int) -> tuple[float, bool, int]:
    """Sorts first what stays first: high scores, then what need not be copied."""
    return -scores[position], position < copied, position


def load(
    model_dir: str, kind: Any = AutoModelForCausalLM, attention: Any = NAME
) -> torch.nn.Module:
    """A model, once for all policies. ``attention``: of its parts, where it has several."""
    AttentionInterface.register(NAME, _attend)
    model: torch.nn.Module = kind.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()
