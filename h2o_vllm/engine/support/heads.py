# SPDX-License-Identifier: Apache-2.0
"""Number of KV heads in the evictable layers, and whether ranks can collect attention. Any process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

FULL = "full_attention"
"""Name of full attention in ``layer_types`` of a model configuration."""


def evictable_kv_heads(model: ModelConfig) -> int:
    """Number of KV heads of a full-attention layer in the whole model; layers with windows may differ."""
    each = model.model_arch_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    full = [each[at].total_num_kv_heads for at, kind in enumerate(kinds) if kind == FULL]
    return min(full, default=model.get_total_num_kv_heads())


def scores_not_because(config: VllmConfig) -> str:
    """Why policies cannot collect attention in this engine; empty if they can.

    With more ranks than KV heads, vLLM gives several ranks a copy of a KV head, and each only some of the
    query heads that attend to it.
    """
    ranks = config.parallel_config.tensor_parallel_size
    heads = evictable_kv_heads(config.model_config) if ranks > 1 else 1
    if ranks <= heads:
        return ""
    return (
        f"each of the model's {heads} KV heads is on {ranks // heads} of {ranks} tensor-parallel ranks, "
        "which see the attention of other queries and would keep other tokens"
    )
