# SPDX-License-Identifier: Apache-2.0
"""H2O in plain torch on a transformers model that sees. Imports nothing of h2o_vllm.

Which tokens exist is :class:`tests.reference.h2o.Reference`'s business, to which a picture's tokens are as
others. What a picture looks like to the model, transformers says. Where in it a token is (M-RoPE), the papers
say: Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForMultimodalLM

from tests.reference.h2o import Reference


@dataclass
class SeeingReference(Reference):
    """Of one sequence, whose prompt is computed at once.

    Args:
        pictures: what a processor makes of the prompt's media: ``pixel_values`` and the like.
    """

    pictures: Mapping[str, Tensor] = field(default_factory=dict)
    _shift: int = 0
    """Added to the index of a word behind the media, it is the word's position."""

    def __post_init__(self) -> None:
        name = f"h2o_reference_{id(self)}"
        AttentionInterface.register(name, self._attend)
        kinds = dict.fromkeys(AutoConfig.from_pretrained(self.model_dir).sub_configs, "eager")
        self.model = AutoModelForMultimodalLM.from_pretrained(
            self.model_dir, dtype=torch.float32, attn_implementation={**kinds, "text_config": name}
        ).eval()

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
        return self._axes(tokens[0].tolist())[:, None]

    def _axes(self, tokens: list[int]) -> Tensor:
        """Time, height and width of each token, [3, T].

        A word has three times one number, the one after the highest before it; so does what begins a picture.
        Transformers (5.3 to 5.19) goes on behind a video as if it had no length in time.
        """
        grids = {
            self.model.config.image_token_id: iter(self._grids("image")),
            self.model.config.video_token_id: iter(self._grids("video")),
        }
        parts: list[Tensor] = []
        at = after = 0
        while at < len(tokens):
            part = torch.zeros(3, 1, dtype=torch.long)
            if tokens[at] in grids:
                step, *sizes = next(grids[tokens[at]])
                part = torch.cartesian_prod(*map(torch.arange, sizes)).T.clone()
                part[0] = (part[0] * step).long()
            parts.append(part + after)
            at, after = at + part.shape[1], int(parts[-1].max()) + 1
        self._shift = after - at
        return torch.cat(parts, 1)

    def _grids(self, kind: str) -> list[tuple[float, int, int, int]]:
        """Of each picture, or part of a video: positions from one frame to the next; frames, rows and columns
        of tokens."""
        sizes = self.pictures.get(f"{kind}_grid_thw")
        if sizes is None:
            return []
        sight = self.model.config.vision_config
        grids: list[tuple[float, int, int, int]] = []
        for at, (frames, *size) in enumerate(sizes.tolist()):
            rows, columns = (one // sight.spatial_merge_size for one in size)
            if "qwen3" in self.model.config.model_type:
                # Words say when each frame is.
                grids += [(1.0, 1, rows, columns)] * frames
                continue
            step = 1.0
            if "second_per_grid_ts" in self.pictures and kind == "video":
                step = sight.tokens_per_second * float(self.pictures["second_per_grid_ts"][at])
            grids.append((step, frames, rows, columns))
        return grids
