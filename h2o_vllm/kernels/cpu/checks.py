# SPDX-License-Identifier: Apache-2.0
"""What the kernels take for granted, checked where it is cheap: once, at start-up.

Runs in the worker. Imports torch and :mod:`h2o_vllm.errors`. The kernels themselves check nothing: a
wrong shape there is a wild write into the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_vllm.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Cache dtypes the kernels can read."""


def check_cache(kv_caches: Sequence[Tensor], scores: Tensor, num_heads: int) -> None:
    """Check the caches and score tensor of all layers once, at start-up.

    Args:
        kv_caches: L tensors [N, KH, BS, 2 * D] of one shape and dtype, contiguous, on the CPU.
        scores: [L, N, KH, BS], float32, contiguous. num_heads: H, a multiple of KH.

    Raises:
        ConfigError: naming what does not fit.
    """
    if not kv_caches:
        raise ConfigError("H2O needs at least one attention layer, got none")
    first = kv_caches[0]
    if first.dim() != 4 or first.shape[3] % 2:
        raise ConfigError(f"kv_cache must be [N, KH, BS, 2 * D], got {tuple(first.shape)}")
    blocks, heads, block_size, _ = first.shape
    if first.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ConfigError(f"the KV cache dtype must be one of {names}, got {first.dtype}")
    if block_size % 16 or (first.shape[3] // 2) % 16:
        raise ConfigError(
            "block size and head size must be multiples of 16, "
            f"got {block_size} and {first.shape[3] // 2}"
        )
    if num_heads % heads:
        raise ConfigError(f"{num_heads} query heads cannot share {heads} kv heads evenly")
    for cache in kv_caches:
        if cache.shape != first.shape or cache.dtype != first.dtype:
            raise ConfigError("the KV caches of all layers must have one shape and dtype")
        if not cache.is_contiguous() or cache.device.type != "cpu":
            raise ConfigError("KV caches must be contiguous CPU tensors")
    wanted = (len(kv_caches), blocks, heads, block_size)
    if tuple(scores.shape) != wanted or scores.dtype != torch.float32:
        raise ConfigError(
            f"scores must be float32 {wanted}, got {scores.dtype} {tuple(scores.shape)}"
        )
    if not scores.is_contiguous() or scores.device.type != "cpu":
        raise ConfigError("scores must be a contiguous CPU tensor")
