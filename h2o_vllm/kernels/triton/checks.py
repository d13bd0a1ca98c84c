# SPDX-License-Identifier: Apache-2.0
"""Checks the assumptions of the GPU kernels at start-up, and refuses untested configurations. Worker process.

The kernels check nothing: a wrong shape would write to wrong places in the KV cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_vllm.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
"""Cache dtypes that the tests cover."""
HEAD_SIZES = (64, 80, 96, 128, 256)
"""Head sizes that the tests cover."""
LARGEST_BLOCK = 8192
"""Tokens; beside layers that keep a state vLLM makes blocks of up to some 4,000."""
MAX_GROUP = 32
"""Most query heads per KV head: the kernel of prompts has as many rows per product where it has fewest."""


def check_layers(
    key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], num_heads: int
) -> None:
    """Check the caches of all layers once, at start-up.

    Args:
        key_caches, value_caches: L views [N, BS, KH, D]. num_heads: H of this rank.

    Raises:
        ConfigError: an assumption does not hold. The message says what is supported.
    """
    first = key_caches[0]
    blocks, block_size, kv_heads, size = first.shape
    if first.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ConfigError(f"the KV cache dtype must be one of {names}, got {first.dtype}")
    if size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        raise ConfigError(f"H2O on GPUs serves head sizes {sizes}, got {size}")
    if block_size % 16 or block_size > LARGEST_BLOCK:
        raise ConfigError(
            f"H2O on GPUs serves block sizes that are multiples of 16, up to {LARGEST_BLOCK}, "
            f"got {block_size}"
        )
    if num_heads % kv_heads or not 1 <= num_heads // kv_heads <= MAX_GROUP:
        raise ConfigError(
            f"H2O on GPUs serves 1 to {MAX_GROUP} query heads per kv head, "
            f"got {num_heads} query heads and {kv_heads} kv heads"
        )
    if blocks * kv_heads * block_size >= 2**31:
        raise ConfigError(
            f"slots of KV heads have 32-bit numbers, got {blocks} blocks of {block_size} for {kv_heads}"
        )
    for caches in (key_caches, value_caches):
        for cache in caches:
            _check_cache(cache, first, caches[0].stride())


def _check_cache(cache: Tensor, first: Tensor, strides: tuple[int, ...]) -> None:
    if (cache.shape, cache.dtype, cache.device) != (first.shape, first.dtype, first.device):
        raise ConfigError("the KV caches of all layers must have one shape, dtype and device")
    if cache.stride() != strides or strides[3] != 1:
        raise ConfigError("the KV caches of all layers must have one layout, contiguous per head")
    # Compaction moves tokens in words of 8 bytes.
    if any(stride * cache.element_size() % 8 for stride in strides[:3]) or cache.data_ptr() % 8:
        raise ConfigError("keys and values must be aligned to 8 bytes")
