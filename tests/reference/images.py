# SPDX-License-Identifier: Apache-2.0
"""The reference of the policies on a transformers model that sees. Imports nothing of h2o_vllm.

Which tokens exist is :class:`.PolicyModel`'s business, to which a picture's tokens are as others. What a
picture looks like to the model, transformers says. Where in it a token is (M-RoPE), the papers say: Qwen2-VL
(arXiv 2409.12191) and Qwen2.5-VL (arXiv 2502.13923).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM

from tests.reference.policies import NAME, PolicyModel, load


def load_seeing(model_dir: str) -> Any:
    """A model whose text has the reference's attention."""
    kinds = dict.fromkeys(AutoConfig.from_pretrained(model_dir).sub_configs, "eager")
    return load(model_dir, AutoModelForMultimodalLM, {**kinds, "text_config": NAME})


@dataclass
class SeeingModel(PolicyModel):
    """Of one sequence, whose prompt is computed at once.

    Args:
        model: see :func:`load_seeing`.
        pictures: what a processor makes of the prompt's media: ``pixel_values`` and the like.
    """

    model: Any
    pictures: Mapping[str, Tensor] = field(default_factory=dict)
    _shift: int = 0
    """Added to the index of a word behind the media, it is the word's position."""

    def _inputs(self, tokens: list[int], position: int) -> dict[str, Tensor]:
        """Positions are [B, T], or one for each axis of M-RoPE, [3, B, T]."""
        rotates, pictures = hasattr(self.model.model, "get_rope_index"), {}
        if not position:
            pictures = dict(self.pictures)
        if rotates and not position:
            positions = self._axes(tokens)[:, None]
        else:
            positions = torch.arange(position, position + len(tokens))[None] + self._shift
            positions = positions.expand(3, 1, -1) if rotates else positions
        return {"position_ids": positions, **pictures}

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
