# SPDX-License-Identifier: Apache-2.0
"""What repeating a prompt would give a token, foretold from the token alone: KVzap, arXiv 2601.07891.

By what ``python -m h2o_vllm.calibrate`` has learned of the model, as the policy ``zap`` does: one ridge
regression per layer and KV head, from a token's keys and values to the logarithm of the largest attention
of a repeating query.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from h2o_vllm.calibration.features import Rotation, features
from h2o_vllm.calibration.file import Calibration
from h2o_vllm.calibration.regression import foretold
from h2o_vllm.policy.zap import MOST, NEWER, SINKS

__all__ = ["Zap"]


@dataclass(frozen=True)
class Zap:
    """A calibration.

    Attributes:
        weights: [L, KH, F + 1]. rotation: how the model turns keys.
    """

    weights: Tensor
    rotation: Rotation

    @classmethod
    def load(cls, path: Path, layers: int, heads: int) -> Zap:
        """From a file.

        Raises:
            ConfigError: it is none.
            SystemExit: it is of a model with other layers or heads.
        """
        calibration = Calibration.load(path)
        made = calibration.traits.layers, calibration.traits.heads
        if made != (layers, heads):
            raise SystemExit(
                f"--calibration {path}: made for {made[0]} layers of {made[1]} KV heads, not {layers} of "
                f"{heads}"
            )
        return cls(calibration.weights, calibration.traits.rotation)

    def scores(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """Of the first T tokens, [KH, T], from [KH, T, D] each; of equals the newest has most."""
        scores = foretold(self.weights[layer], features(keys, values, self.rotation))
        scores[:, :SINKS] = MOST
        return scores * torch.exp(NEWER * torch.arange(keys.shape[1]))
