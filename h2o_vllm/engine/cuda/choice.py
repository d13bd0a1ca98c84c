# SPDX-License-Identifier: Apache-2.0
"""Chooses one of our attention backends, and warns of what is slower. Worker process.

========================== ====================== ==========================================
GPU                        vLLM's own choice      ours
========================== ====================== ==========================================
8.x, 9.x, 11.x, 12.x       FlashAttention 2 to 4  the same one
10.x (B200, B300)          FlashInfer             FlashAttention 4
10.x, head size 256        FlashInfer             Triton
float32, older than 8.0    Triton                 Triton
fp8 KV on 8.9, 12.x        FlashInfer             Triton
sinks on 8.x, 12.x         Triton                 Triton
sinks on 10.x              FlashInfer             Triton
========================== ====================== ==========================================

None of ours is built on FlashInfer: as vLLM calls it, it does not return the log-sum-exp that scores need.
On all GPUs, requests with a budget decode in our own kernel. Only the attention of prompts, and of requests
without a budget, depends on this choice.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.fa_utils import (
    flash_attn_supports_kv_cache_dtype,
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
    uses_fa4_hd256_kernel,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.registry import register_backend as vllm_register_backend

from h2o_vllm.engine.cuda.backends import FLASH_VERSIONS, H2OFlashBackend, H2OTritonBackend
from h2o_vllm.engine.support.refusal import is_one_of
from h2o_vllm.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

logger = init_logger(f"vllm.{__name__}")

_BACKENDS: dict[str, type[AttentionBackend]] = {
    "flash_attn": H2OFlashBackend,
    "triton_attn": H2OTritonBackend,
}
SINKS = ("GptOssForCausalLM",)
"""Architectures with attention sinks where attention is full: their configuration does not show it."""


def _why_not_flash(config: VllmConfig) -> str | None:
    """The reason why FlashAttention cannot serve, or ``None`` if it can."""
    model, capability = config.model_config, current_platform.get_device_capability()
    size = model.get_head_size()
    if capability is None or not H2OFlashBackend.supports_compute_capability(capability):
        return f"FlashAttention needs compute capability 8.0, this GPU has {capability}"
    if not (
        H2OFlashBackend.supports_dtype(model.dtype) and H2OFlashBackend.supports_head_size(size)
    ):
        return f"FlashAttention does not take {model.dtype} or head size {size}"
    version = None
    if is_flash_attn_varlen_func_available():
        # As ``FlashAttentionImpl`` calls it. The last argument matters for head size 256 on 10.x.
        version = get_flash_attn_version(head_size=size, supports_fa4_hd256=True)
    if version not in FLASH_VERSIONS:
        known = ", ".join(map(str, FLASH_VERSIONS))
        return f"vLLM resolves to FlashAttention {version}, h2o_vllm knows {known}"
    kv_dtype = config.cache_config.cache_dtype
    if is_quantized_kv_cache(kv_dtype) and not flash_attn_supports_kv_cache_dtype(
        kv_dtype, head_size=size, head_size_v=size, supports_fa4_hd256=True
    ):
        return f"FlashAttention {version} does not read --kv-cache-dtype {kv_dtype} on this GPU"
    if version == 4 and uses_fa4_hd256_kernel(size):
        return (
            "FlashAttention 4's kernel for head size 256 needs blocks of 128 tokens and block tables "
            "of its own (attention_config's flash_attn_version 2 chooses FlashAttention 2)"
        )
    sinks = version != 3 and is_one_of(config, SINKS)
    return f"FlashAttention {version} is not tested with attention sinks" if sinks else None


def choose_backend(config: VllmConfig) -> type[AttentionBackend]:
    """FlashAttention if it can serve, else Triton. ``H2O_CUDA_BACKEND`` overrides the choice.

    Raises:
        ConfigError: ``H2O_CUDA_BACKEND`` names no backend of ours.
    """
    wanted = os.environ.get("H2O_CUDA_BACKEND")
    if wanted:
        if wanted not in _BACKENDS:
            raise ConfigError(
                f"H2O_CUDA_BACKEND must be one of {', '.join(_BACKENDS)}, got {wanted!r}"
            )
        return _BACKENDS[wanted]
    return H2OTritonBackend if _why_not_flash(config) else H2OFlashBackend


def register_backend(config: VllmConfig) -> None:
    """Register our backend as ``--attention-backend CUSTOM`` in this process."""
    backend = choose_backend(config)
    vllm_register_backend(
        AttentionBackendEnum.CUSTOM, f"{backend.__module__}.{backend.__qualname__}"
    )


def warn_of_triton(config: VllmConfig) -> None:
    """Log why prompts run on vLLM's Triton attention, if they do. The first rank calls it once."""
    if choose_backend(config) is H2OTritonBackend:
        logger.warning(
            "h2o: prompts and requests without a budget run on vLLM's Triton attention: %s",
            _why_not_flash(config) or "H2O_CUDA_BACKEND selects it",
        )
