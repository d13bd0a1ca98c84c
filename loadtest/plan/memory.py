# SPDX-License-Identifier: Apache-2.0
"""How many tokens of KV a GPU has room for beside the weights. Pure."""

from __future__ import annotations

from loadtest.plan.gpus import GPU
from loadtest.plan.roofline import SCORE_BYTES
from loadtest.plan.shapes import ModelShape, ShapeError

__all__ = ["UTILIZATION", "pool_blocks"]

UTILIZATION = 0.92
"""vLLM's default of ``--gpu-memory-utilization`` (0.32)."""

RESERVED = 2 << 30
"""Bytes beside weights, activations and KV: CUDA's context, graphs, NCCL. An assumption."""


def pool_blocks(
    shape: ModelShape,
    gpu: GPU,
    block_size: int,
    max_num_batched_tokens: int,
    *,
    tensor_parallel: int = 1,
    dtype_bytes: int = 2,
    kv_dtype_bytes: int | None = None,
    utilization: float = UTILIZATION,
    scored: bool = False,
) -> int:
    """Blocks of the pool, the null block included.

    Args:
        dtype_bytes: of weights and activations. kv_dtype_bytes: of KV; as many if left out.
        scored: whether every token has a score beside its KV, as it has with us.

    Raises:
        ShapeError: the weights leave no room.
    """
    weights = shape.parameters * dtype_bytes / tensor_parallel
    # The largest at a time: hidden states, the MLP's two halves, and logits in float32.
    widest = 4 * shape.hidden + 2 * shape.intermediate // tensor_parallel
    activations = max_num_batched_tokens * widest * dtype_bytes
    free = utilization * gpu.memory - weights - activations - RESERVED
    token = shape.kv_bytes(kv_dtype_bytes or dtype_bytes, tensor_parallel)
    if scored:
        # And the early part of it.
        token += 2 * SCORE_BYTES * shape.layers * shape.kv_heads_of(tensor_parallel)
    blocks = int(free // (token * block_size))
    if blocks < 2:
        raise ShapeError(
            f"--tensor-parallel {tensor_parallel}: the weights of {shape.name}, {weights / 2**30:.0f} GiB of "
            f"each GPU, leave no room for KV on {gpu.name}"
        )
    return blocks
