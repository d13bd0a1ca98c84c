# SPDX-License-Identifier: Apache-2.0
"""Our attention backends, each on top of one of vLLM's, and the choice between them. Worker process.

FlashAttention is vLLM's default on Ampere and Hopper, so a request without a budget runs at stock
speed. Triton serves what FlashAttention does not: float32, older GPUs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.registry import register_backend as vllm_register_backend

from h2o_vllm.blocks.spec import evictable_spec
from h2o_vllm.engine.cuda.builder import ScoringBuilder
from h2o_vllm.engine.cuda.impl import CudaScoringImpl, key_value_views, paged_views
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
    from vllm.v1.kv_cache_interface import AttentionSpec

    from h2o_vllm.engine.attention import AttentionCall
    from h2o_vllm.engine.cuda.batch import ScoredBatch

__all__ = ["H2OFlashBackend", "H2OTritonBackend", "choose_backend", "register_backend"]

BACKEND = AttentionBackendEnum.CUSTOM.name
"""What ``--attention-backend`` has to say for vLLM to bind us."""

_FLASH_VERSIONS = (2, 3)
"""FlashAttention versions whose treatment of rows of length 0 has been read: they write zeros."""


class ScoringBackend:
    """What our backends share; the first base, so that it comes before vLLM's."""

    impl_cls: ClassVar[type[AttentionImpl]]
    builder_cls: ClassVar[type[ScoringBuilder]]

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Our attention."""
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> Any:
        """Our metadata builder."""
        return cls.builder_cls

    @staticmethod
    def get_name() -> str:
        """A member of ``AttentionBackendEnum``, by which layers look us up."""
        return BACKEND

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Make full attention evictable. Quantised KV, which the base would repack, is refused."""
        return evictable_spec(spec)


class H2OFlashBuilder(ScoringBuilder, flash_attn.FlashAttentionMetadataBuilder):
    """FlashAttention's builder; its ahead-of-time schedule sees the lengths that vLLM attends."""


class H2OFlashImpl(CudaScoringImpl, flash_attn.FlashAttentionImpl):
    """FlashAttention, which returns the LSE by itself."""

    stock = flash_attn.FlashAttentionImpl

    def attend_with_lse(self, call: AttentionCall, batch: ScoredBatch) -> torch.Tensor:
        """The call of ``FlashAttentionImpl.forward`` for plain causal attention, asking for the LSE."""
        stock = batch.stock
        assert stock is not None
        keys, values = paged_views(call.kv_cache, self.head_size)
        _, lse = flash_attn.flash_attn_varlen_func(
            q=call.query[: batch.num_tokens],
            k=keys,
            v=values,
            out=call.output[: batch.num_tokens],
            cu_seqlens_q=stock.query_start_loc,
            max_seqlen_q=stock.max_query_len,
            seqused_k=stock.seq_lens,
            max_seqlen_k=stock.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            block_table=stock.block_table,
            return_softmax_lse=True,
            scheduler_metadata=stock.scheduler_metadata,
            fa_version=self.vllm_flash_attn_version,
            num_splits=stock.max_num_splits,
        )
        return lse


class H2OFlashBackend(ScoringBackend, flash_attn.FlashAttentionBackend):
    """vLLM's FlashAttention backend with our builder, implementation and KV cache spec."""

    impl_cls, builder_cls = H2OFlashImpl, H2OFlashBuilder


class H2OTritonBuilder(ScoringBuilder, triton_attn.TritonAttentionMetadataBuilder):
    """The Triton backend's builder."""


class H2OTritonImpl(CudaScoringImpl, triton_attn.TritonAttentionImpl):
    """The Triton backend, which keeps its LSE to itself: one more pass over the prompt's keys."""

    stock = triton_attn.TritonAttentionImpl

    def attend_with_lse(self, call: AttentionCall, batch: ScoredBatch) -> torch.Tensor:
        """Stock attention, then the LSE of the prompt rows."""
        assert batch.prompt_rows is not None
        self.attend_stock(call, batch.stock)
        query = call.query[: batch.num_tokens]
        keys, _ = key_value_views(call.kv_cache, self.head_size)
        tokens, heads, _ = query.shape
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
        kernels.prompt_lse(
            query,
            keys,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            self.scale,
            lse,
            batch.max_query_len,
            batch.prompt_rows,
        )
        return lse


class H2OTritonBackend(ScoringBackend, triton_attn.TritonAttentionBackend):
    """vLLM's Triton backend with our builder, implementation and KV cache spec."""

    impl_cls, builder_cls = H2OTritonImpl, H2OTritonBuilder


_BACKENDS: dict[str, type[AttentionBackend]] = {
    "flash_attn": H2OFlashBackend,
    "triton_attn": H2OTritonBackend,
}


def choose_backend(config: VllmConfig) -> type[AttentionBackend]:
    """FlashAttention where vLLM could use it, else Triton; ``H2O_CUDA_BACKEND`` overrides.

    Raises:
        ConfigError: the override is unknown.
    """
    wanted = os.environ.get("H2O_CUDA_BACKEND")
    if wanted is not None:
        if wanted not in _BACKENDS:
            raise ConfigError(
                f"H2O_CUDA_BACKEND must be one of {', '.join(_BACKENDS)}, got {wanted!r}"
            )
        return _BACKENDS[wanted]
    model = config.model_config
    size, capability = model.get_head_size(), current_platform.get_device_capability()
    flash = (
        is_flash_attn_varlen_func_available()
        and capability is not None
        and H2OFlashBackend.supports_compute_capability(capability)
        and H2OFlashBackend.supports_dtype(model.dtype)
        and H2OFlashBackend.supports_head_size(size)
        and get_flash_attn_version(head_size=size) in _FLASH_VERSIONS
    )
    return H2OFlashBackend if flash else H2OTritonBackend


def register_backend(config: VllmConfig) -> None:
    """Let ``--attention-backend CUSTOM`` mean ours, in this process."""
    backend = choose_backend(config)
    vllm_register_backend(
        AttentionBackendEnum.CUSTOM, f"{backend.__module__}.{backend.__qualname__}"
    )
