# SPDX-License-Identifier: Apache-2.0
"""Predicted attention of tokens in blocks, by a calibration, on a CPU. Worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.reference import attention_of

if TYPE_CHECKING:
    from h2o_vllm.calibration.file import Part

__all__ = ["predicted"]


def predicted(
    part: Part,
    kv_caches: Sequence[Tensor],
    blocks: Sequence[int],
    add_ranks: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The attention that tokens are predicted to get, [L, KH, n * BS], float32, block by block.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D].
        blocks: ids of n blocks in which all heads have the same tokens.
        add_ranks: adds up a tensor of each rank, in place; needed if a part is not all.
    """
    rotary, interleaved = part.rotation
    where = torch.tensor(blocks, dtype=torch.int32)
    given = (kv_caches, where, part.weights, rotary)
    if not part.of_all_heads:
        return kernels.predict(*given, interleaved=interleaved)
    assert add_ranks is not None
    sums = kernels.predict(*given, interleaved=interleaved, sums_alone=True)
    add_ranks(sums)
    return attention_of(sums[:, part.first : part.first + kv_caches[0].shape[1]])
