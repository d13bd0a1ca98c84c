# SPDX-License-Identifier: Apache-2.0
"""KV cache specs that make vLLM bind our block managers. Worker and engine core."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from h2o_vllm.blocks.schedule import GroupBeside, default_blocks
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = [
    "H2OAttentionSpec",
    "H2OChunkedSpec",
    "H2OMambaSpec",
    "H2OSlidingWindowSpec",
    "evictable_spec",
    "groups_beside",
    "limited_spec",
    "register_specs",
    "score_bytes_per_block",
]

SCORE_BYTES = 8
"""Bytes per (token, KV head): its score, and the early part of it, float32 each."""


@dataclass(frozen=True, kw_only=True)
class H2OAttentionSpec(FullAttentionSpec):
    """Full attention whose blocks may be freed in the middle. Same memory layout as its base.

    No field of its own: ``FullAttentionSpec.merge`` rebuilds it from a fixed list of fields.
    """

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Of one request of the model's length that leaves its budget to the server.

        vLLM does not start with a smaller pool. Others that need more than the pool are refused.
        """
        whole = super().max_memory_usage_bytes(vllm_config)
        options = vllm_config.additional_config.get(CONFIG_KEY)
        if options is None:
            return whole
        config = H2OConfig.from_mapping(options)
        length = vllm_config.model_config.max_model_len
        blocks = default_blocks(config, self.block_size, length)
        return min(whole, blocks * self.page_size_bytes)


class H2OSlidingWindowSpec(SlidingWindowSpec):
    """A sliding window beside evictable layers: see :mod:`h2o_vllm.blocks.beside`. No field of its own."""


class H2OChunkedSpec(ChunkedLocalAttentionSpec):
    """Attention in chunks beside evictable layers. No field of its own."""


class H2OMambaSpec(MambaSpec):
    """A state beside evictable layers. No field of its own."""


_LIMITED: dict[type[KVCacheSpec], type[KVCacheSpec]] = {
    SlidingWindowSpec: H2OSlidingWindowSpec,
    ChunkedLocalAttentionSpec: H2OChunkedSpec,
    MambaSpec: H2OMambaSpec,
}


def limited_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Mark a layer beside the evictable ones, so that its manager knows of evictions; leave others alone."""
    limited = _LIMITED.get(type(spec))
    return spec if limited is None else _as(limited, spec)


def evictable_spec(spec: AttentionSpec) -> AttentionSpec:
    """Mark plain full attention as evictable; leave every other kind of layer alone."""
    plain = type(spec) is FullAttentionSpec and not spec.non_causal
    if not plain or spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return spec
    evictable: AttentionSpec = _as(H2OAttentionSpec, spec)
    return evictable


def _as(kind: type[Any], spec: KVCacheSpec) -> Any:
    return kind(**{one.name: getattr(spec, one.name) for one in fields(spec) if one.init})


def score_bytes_per_block(spec: H2OAttentionSpec) -> int:
    """Memory the scores of one block of one layer take, beside ``spec.page_size_bytes``."""
    return spec.num_kv_heads * spec.block_size * SCORE_BYTES


def groups_beside(kv_cache: KVCacheConfig, config: VllmConfig) -> tuple[GroupBeside, ...]:
    """The groups beside ours, by the same rule as vLLM's size of the pool and its admission."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    return tuple(
        GroupBeside(
            spec.block_size if isinstance(spec, AttentionSpec) else 1,
            spec.max_memory_usage_bytes(config) // spec.page_size_bytes,
        )
        for spec in specs
        if not isinstance(spec, H2OAttentionSpec)
    )


def register_specs() -> None:
    """Bind each spec to its manager. Idempotent; call it in every process that plans blocks."""
    from h2o_vllm.blocks import beside
    from h2o_vllm.blocks.manager import H2OBlockManager

    # The registry fills itself only while it is empty, so the built-ins have to come first; any
    # look-up makes them.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    for spec, manager, base in (
        (H2OAttentionSpec, H2OBlockManager, FullAttentionSpec),
        (H2OSlidingWindowSpec, beside.H2OSlidingWindowManager, SlidingWindowSpec),
        (H2OChunkedSpec, beside.H2OChunkedManager, ChunkedLocalAttentionSpec),
        (H2OMambaSpec, beside.H2OMambaManager, MambaSpec),
    ):
        KVCacheSpecRegistry.register(spec, manager, uniform_type_base_spec=base)
