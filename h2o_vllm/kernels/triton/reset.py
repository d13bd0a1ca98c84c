# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Resets the scores of newly written slots, in all layers and heads at once."""

import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton.launching import launch

_SLOTS = 128


def reset_scores(scores: Tensor, slots: Tensor) -> None:
    """Set the scores of newly written slots to zero. Eager, one launch.

    Args:
        scores: [L, N, KH, BS], float32, contiguous.
        slots: [n], int64, ``block_id * BS + offset``, each once. Negative ones (vLLM's padding) are skipped.
    """
    layers, blocks, heads, block_size = scores.shape
    count = slots.shape[0]
    if count == 0:
        return
    constants = {"KH": heads, "BS": block_size, "SLOTS": _SLOTS, "num_warps": 4}
    grid = (-(-count // _SLOTS), layers * heads)
    launch(_reset, grid, (heads, block_size), (scores, slots, count, blocks), constants)


@triton.jit(do_not_specialize=["count", "num_blocks"])
def _reset(
    scores, slots, count, num_blocks,
    KH: tl.constexpr, BS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    which = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + at, mask=at < count, other=-1)
    block = (which // KH) * num_blocks + slot // BS
    tl.store(scores + (block * KH + which % KH) * BS + slot % BS, 0.0, mask=slot >= 0)
