# SPDX-License-Identifier: Apache-2.0
"""KV cache spec that makes vLLM bind our block manager. Worker and engine core."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from h2o_vllm.blocks.schedule import default_blocks
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["H2OAttentionSpec", "evictable_spec", "register_spec", "score_bytes_per_block"]

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


def evictable_spec(spec: AttentionSpec) -> AttentionSpec:
    """Mark plain full attention as evictable; leave every other kind of layer alone."""
    plain = type(spec) is FullAttentionSpec and not spec.non_causal
    if not plain or spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return spec
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
    return H2OAttentionSpec(**values)


def score_bytes_per_block(spec: H2OAttentionSpec) -> int:
    """Memory the scores of one block of one layer take, beside ``spec.page_size_bytes``."""
    return spec.num_kv_heads * spec.block_size * SCORE_BYTES


def register_spec() -> None:
    """Bind the spec to its manager. Idempotent; call it in every process that plans blocks."""
    from h2o_vllm.blocks.manager import H2OBlockManager

    # The registry fills itself only while it is empty, so the built-ins have to come first; any
    # look-up makes them.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(
        H2OAttentionSpec, H2OBlockManager, uniform_type_base_spec=FullAttentionSpec
    )
