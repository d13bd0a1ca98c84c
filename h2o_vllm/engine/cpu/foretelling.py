# SPDX-License-Identifier: Apache-2.0
"""Calibrations on a CPU: learned from evictions of repeated prompts, used for those of others. Worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from h2o_vllm.calibration.features import Rotation, features
from h2o_vllm.calibration.regression import Sums
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu.batch import tokens_of

if TYPE_CHECKING:
    from h2o_vllm.blocks.plan import Eviction
    from h2o_vllm.calibration.file import Calibration

__all__ = ["Learner", "foretold"]


def foretold(
    calibration: Calibration, kv_caches: Sequence[Tensor], blocks: Sequence[int]
) -> Tensor:
    """The attention that tokens are expected to get, [L, KH, n * BS], float32, block by block.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D].
        blocks: ids of n blocks in which all heads have the same tokens.
    """
    rotary, interleaved = calibration.traits.rotation
    where = torch.tensor(blocks, dtype=torch.int32)
    return kernels.foretell(kv_caches, where, calibration.weights, rotary, interleaved=interleaved)


class Learner:
    """Adds up tokens whose scores are what repeating has looked at.

    Args:
        rotation: how the model turns keys.
    """

    def __init__(self, layers: int, rotation: Rotation) -> None:
        self._sums = [Sums() for _ in range(layers)]
        self._rotation = rotation

    @property
    def tokens(self) -> int:
        """So many so far."""
        return self._sums[0].tokens

    def learn(
        self, evictions: Sequence[Eviction], scores: Tensor, kv_caches: Sequence[Tensor]
    ) -> None:
        """Before they move: what their requests' prompts have given.

        Args:
            scores: [L, N, KH, BS]. kv_caches: L tensors [N, KH, BS, 2 * D].
        """
        for eviction in evictions:
            blocks = torch.tensor(eviction.fresh_blocks)
            for layer, sums in enumerate(self._sums):
                wanted = scores[layer, blocks].transpose(0, 1).flatten(1)
                known = features(*tokens_of(kv_caches[layer], blocks), self._rotation)
                # The first token takes what nobody else wants: it is no example of anything.
                skip = 1 if eviction.fresh_from == 0 else 0
                sums.add(known[:, skip:], wanted[:, skip:])

    def weights(self) -> Tensor:
        """[L, KH, F + 1], float32.

        Raises:
            ValueError: nothing was learned.
        """
        return torch.stack([sums.solve() for sums in self._sums])
