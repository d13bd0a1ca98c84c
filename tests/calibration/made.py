# SPDX-License-Identifier: Apache-2.0
"""Calibrations of random weights, for engines in which it only matters that each token has a score."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from h2o_vllm.calibration.features import Rotation, num_features
from h2o_vllm.calibration.file import Calibration, Traits, attention_of

ROTATIONS = {80: Rotation(32, True), 96: Rotation(0)}
"""Of some head sizes; of the others the whole key turns."""


def calibration_of(
    layers: int, heads: int, size: int, *, own: bool = False, rotation: Rotation | None = None
) -> Calibration:
    """Of random weights; ``own``: heads are predicted by what they know themselves."""
    rotation = rotation or ROTATIONS.get(size, Rotation(size))
    count = (2 * size - rotation.size // 2) * (1 if own else heads)
    gen = torch.Generator().manual_seed(7)
    # Of attention between 0.0001 and 1.
    weights = torch.randn(layers, heads, count + 1, generator=gen) * count**-0.5
    weights[..., -1] = -3.0
    return Calibration(weights, Traits(layers, heads, size, size, rotation, torch.ones(1)))


def make_calibration(model: Path, path: Path) -> Path:
    """Of a Llama: what a token is predicted depends on all that is known of it."""
    config = json.loads((model / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    norms = []
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            weight = file.get_tensor(name)
            if weight.dim() == 1 and "norm" in name:
                norms.append(weight.float().abs().mean())
    rotation = Rotation(size)
    source = torch.Generator().manual_seed(0)
    count = num_features(heads, size, size, rotation)
    weights = torch.randn(layers, heads, count + 1, generator=source) * 0.02
    weights[..., -1] = -5.0
    traits = Traits(layers, heads, size, size, rotation, torch.stack(norms))
    Calibration(weights, traits, {"model": model.name}).save(path)
    return path


def predicted(weights: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The attention that solved weights expect of features, [KH, T]."""
    return attention_of((known @ weights[:, :-1, None])[..., 0] + weights[:, -1:])
