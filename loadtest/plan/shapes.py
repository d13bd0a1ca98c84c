# SPDX-License-Identifier: Apache-2.0
"""Of a model only its shape: parameters, bytes per token of KV, operations per token. Pure.

Dense decoders with gated MLPs, as Llama, Mistral and Qwen have them. Biases and norms, less than 0.1 % of the
parameters, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "ModelShape", "ShapeError", "load_shape"]


class ShapeError(ValueError):
    """A configuration that cannot be read, or of a kind of model that is not planned for."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, with the names of its ``config.json``.

    Attributes:
        tied: whether the embedding is the output layer as well.
        max_tokens: the longest context, ``max_position_embeddings``.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    max_tokens: int

    @property
    def layer_parameters(self) -> int:
        """Of all layers: the four projections of attention and the three of the MLP."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output_parameters(self) -> int:
        """Of the layer that makes logits."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layer_parameters + self.output_parameters * (1 if self.tied else 2)

    def kv_bytes(self, dtype_bytes: int) -> int:
        """Of a token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * dtype_bytes


def _llama(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int
) -> ModelShape:
    return ModelShape(
        name, layers, hidden, intermediate, heads, kv_heads, 128, 128_256, False, 131_072
    )


SHAPES = {
    shape.name: shape
    for shape in (
        # Grattafiori et al. 2024, arXiv 2407.21783, table 3.
        _llama("8b", 32, 4096, 14_336, 32, 8),
        _llama("70b", 80, 8192, 28_672, 64, 8),
    )
}
"""Llama 3.1's."""


def load_shape(model: str) -> ModelShape:
    """One of :data:`SHAPES`, or what the ``config.json`` of a model's directory says.

    Raises:
        ShapeError: there is no such thing, or its memory and time are not those of a dense decoder.
    """
    if model in SHAPES:
        return SHAPES[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ShapeError(
            f"--model: got {model!r}, wanted {', '.join(SHAPES)}, or a directory with a config.json"
        ) from error
    return shape_of(config, path.parent.resolve().name)


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a ``config.json`` describes.

    Raises:
        ShapeError: see :func:`load_shape`.
    """
    for key, what in _OTHERS.items():
        if config.get(key):
            raise ShapeError(f"--model: {name} has {what} ({key}), which is not planned for")
    missing = [key for key in _NEEDED if not isinstance(config.get(key), int)]
    if missing:
        raise ShapeError(f"--model: the config.json of {name} lacks {', '.join(missing)}")
    layers, hidden, intermediate, heads, vocabulary, longest = (config[key] for key in _NEEDED)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings", False)),
        max_tokens=longest,
    )


_NEEDED = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip

_OTHERS = {
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "kv_lora_rank": "latent attention",
    "quantization_config": "quantised weights",
    "text_config": "more than a language model",
    "num_kv_shared_layers": "layers that share KV",
}
