# SPDX-License-Identifier: Apache-2.0
"""KV cache specs that make vLLM use our block managers. Worker and engine core."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from h2o_vllm.blocks.counts.schedule import OtherGroup
from h2o_vllm.blocks.counts.settling import default_blocks
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

SCORE_BYTES = 8
"""Bytes per token and KV head: its score and the early part of its score, float32 each."""


@dataclass(frozen=True, kw_only=True)
class H2OAttentionSpec(FullAttentionSpec):
    """Full attention with blocks that may be freed in the middle of a table. Same memory layout as its base.

    It adds no field: ``FullAttentionSpec.merge`` rebuilds it from a fixed list of fields.
    """

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Memory of one request of the model's length with the server's default budget, in bytes.

        vLLM does not start with a smaller pool. A request that needs more than the pool is refused.
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
    """A sliding window in a model with evictable layers, see :mod:`.other_groups`. Adds no field."""


class H2OChunkedSpec(ChunkedLocalAttentionSpec):
    """Attention in chunks in such a model. Adds no field."""


class H2OMambaSpec(MambaSpec):
    """A state in such a model. Adds no field."""


_LIMITED: dict[type[KVCacheSpec], type[KVCacheSpec]] = {
    SlidingWindowSpec: H2OSlidingWindowSpec,
    ChunkedLocalAttentionSpec: H2OChunkedSpec,
    MambaSpec: H2OMambaSpec,
}


def limited_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """For a window, chunks or a state: the spec of a :class:`.LimitedManager`; for other layers, ``spec``."""
    limited = _LIMITED.get(type(spec))
    return spec if limited is None else _as(limited, spec)


def evictable_spec(spec: AttentionSpec) -> AttentionSpec:
    """The evictable spec for plain full attention; ``spec`` for every other kind of layer."""
    plain = type(spec) is FullAttentionSpec and not spec.non_causal
    if not plain or spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return spec
    evictable: AttentionSpec = _as(H2OAttentionSpec, spec)
    return evictable


def _as(kind: type[Any], spec: KVCacheSpec) -> Any:
    return kind(**{one.name: getattr(spec, one.name) for one in fields(spec) if one.init})


def score_bytes_per_block(spec: H2OAttentionSpec) -> int:
    """Bytes of the scores of one block of one layer, in addition to ``spec.page_size_bytes``."""
    return spec.num_kv_heads * spec.block_size * SCORE_BYTES


def other_groups(kv_cache: KVCacheConfig, config: VllmConfig) -> tuple[OtherGroup, ...]:
    """The groups that are not evicted, counted as vLLM counts them for the pool's size and for admission."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    return tuple(
        OtherGroup(
            spec.block_size if isinstance(spec, AttentionSpec) else 1,
            spec.max_memory_usage_bytes(config) // spec.page_size_bytes,
        )
        for spec in specs
        if not _is_evictable(spec)
    )


def _is_evictable(spec: KVCacheSpec) -> bool:
    # The layers of a drafter may have another shape than the model's: then a group has a spec for each layer.
    layers = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    return all(isinstance(layer, H2OAttentionSpec) for layer in layers)


def register_specs() -> None:
    """Register each spec with its manager. Idempotent. Call it in each process that plans blocks."""
    from h2o_vllm.blocks.manager import other_groups as others
    from h2o_vllm.blocks.manager.block_manager import H2OBlockManager

    # The registry adds vLLM's own specs only while it is empty, at any look-up: they must come first.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    for spec, manager, base in (
        (H2OAttentionSpec, H2OBlockManager, FullAttentionSpec),
        (H2OSlidingWindowSpec, others.H2OSlidingWindowManager, SlidingWindowSpec),
        (H2OChunkedSpec, others.H2OChunkedManager, ChunkedLocalAttentionSpec),
        (H2OMambaSpec, others.H2OMambaManager, MambaSpec),
    ):
        KVCacheSpecRegistry.register(spec, manager, uniform_type_base_spec=base)
