# SPDX-License-Identifier: Apache-2.0
"""H2O in plain torch on a transformers model that sees pictures. Imports nothing of h2o_vllm.

Which tokens exist is :class:`tests.reference.h2o.Reference`'s business, to which a picture's tokens are as
others. What a picture looks like to the model, and where in it a token is (M-RoPE), transformers says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForImageTextToText

from tests.reference.h2o import Reference

__all__ = ["SeeingReference"]


@dataclass
class SeeingReference(Reference):
    """Of one sequence, whose prompt is computed at once.

    Args:
        pictures: what a processor makes of the prompt's pictures: ``pixel_values`` and the like.
    """

    pictures: Mapping[str, Tensor] = field(default_factory=dict)
    _shift: int = 0
    """Added to the index of a word behind the pictures, it is the word's position."""

    def __post_init__(self) -> None:
        name = f"h2o_reference_{id(self)}"
        AttentionInterface.register(name, self._attend)
        self.model = AutoModelForImageTextToText.from_pretrained(
            self.model_dir, dtype=torch.float32,
            attn_implementation={"text_config": name, "vision_config": "eager"},
        ).eval()  # fmt: skip

    def _forward(self, tokens: Tensor, keep: int = 1) -> Tensor:
        given = {} if self.layers else self.pictures
        output = self.model(
            input_ids=tokens, position_ids=self._positions(tokens), past_key_values=self.states,
            use_cache=True, logits_to_keep=keep, **given,
        )  # fmt: skip
        return output.logits.float()

    def _positions(self, tokens: Tensor) -> Tensor:
        """[B, T], or one for each axis of M-RoPE, [3, B, T]."""
        rotates = hasattr(self.model.model, "get_rope_index")
        if self.layers or not rotates:
            start = self.seen + self._shift if self.layers else 0
            positions = torch.arange(start, start + tokens.shape[1])[None]
            return positions.expand(3, 1, -1) if rotates else positions
        positions, shift = self.model.model.get_rope_index(
            tokens, mm_token_type_ids=(tokens == self.model.config.image_token_id).int(),
            image_grid_thw=self.pictures.get("image_grid_thw"),
        )  # fmt: skip
        self._shift = int(shift)
        return positions
