# SPDX-License-Identifier: Apache-2.0
"""A transformers model whose attention is whatever stage is on: reading, repeating, answering."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from loadtest.quality.ladder.zap import Zap

__all__ = ["LadderModel", "Stage"]


class Stage(Protocol):
    """Computes attention, and keeps what it wants to know of it."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """query: [B, H, T, D]; key, value: [B, KH, T, D], rotated. Returns [B, H, T, D]."""


class LadderModel:
    """The model and its tokenizer.

    Args:
        directory: a transformers model with rotary positions, whose attention goes through the attention
            interface.
        dtype: of weights and KV; scores are float32.
    """

    def __init__(self, directory: str, dtype: torch.dtype) -> None:
        # One name each, so that several may live side by side.
        name = f"ladder_{id(self)}"
        AttentionInterface.register(name, self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=name
        ).eval()
        self.config = self.model.config
        self._directory = directory
        self._tokenizer: Any = None
        self.gate: Tensor | None = None
        """Weights, [L, KH, F + 1], trained if a rung asks for it."""
        self.zap: Zap | None = None
        """A calibration, if there is one."""
        self._stage: Stage | None = None

    @property
    def tokenizer(self) -> Any:
        """Loaded when it is asked for: tests have none."""
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self._directory)
        return self._tokenizer

    @torch.inference_mode()
    def forward(self, stage: Stage, tokens: Tensor, start: int, keep: int = 1) -> Tensor:
        """Logits of the last ``keep`` of new tokens, [B, T], the first of which is at position ``start``."""
        self._stage = stage
        positions = torch.arange(start, start + tokens.shape[1])[None].expand_as(tokens)
        output = self.model(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep
        )
        self._stage = None
        logits: Tensor = output.logits
        return logits

    @torch.inference_mode()
    def rotation(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, [end - start, D] each, float32."""
        positions = torch.arange(start, end)[None]
        cos, sin = self.model.model.rotary_emb(torch.zeros(1), positions)
        return cos[0].float(), sin[0].float()

    @property
    def ends(self) -> set[int]:
        """Tokens that end an answer."""
        found = self.model.generation_config.eos_token_id
        return set(found) if isinstance(found, list) else {found}

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object,
        scaling: float, **__: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert self._stage is not None
        mixed = self._stage.attend(module.layer_idx, query, key, value, scaling)
        return mixed.transpose(1, 2).contiguous(), None
