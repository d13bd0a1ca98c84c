# SPDX-License-Identifier: Apache-2.0
"""Predicted attention of tokens in blocks, by a calibration, on a CPU. Worker process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from h2o_vllm.kernels import cpu as kernels

if TYPE_CHECKING:
    from h2o_vllm.calibration.file import Calibration

__all__ = ["predicted"]


def predicted(
    calibration: Calibration, kv_caches: Sequence[Tensor], blocks: Sequence[int]
) -> Tensor:
    """The attention that tokens are predicted to get, [L, KH, n * BS], float32, block by block.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D].
        blocks: ids of n blocks in which all heads have the same tokens.
    """
    rotary, interleaved = calibration.traits.rotation
    where = torch.tensor(blocks, dtype=torch.int32)
    return kernels.predict(kv_caches, where, calibration.weights, rotary, interleaved=interleaved)
