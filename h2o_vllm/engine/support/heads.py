# SPDX-License-Identifier: Apache-2.0
"""How many KV heads a model's evictable layers have, and what follows for its ranks. Any process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

FULL = "full_attention"
"""What ``layer_types`` of a model's configuration calls a layer of full attention."""


def evictable_kv_heads(model: ModelConfig) -> int:
    """KV heads of a layer of full attention in the whole model; layers with windows may have others."""
    each = model.model_arch_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    full = [each[at].total_num_kv_heads for at, kind in enumerate(kinds) if kind == FULL]
    return min(full, default=model.get_total_num_kv_heads())


def scores_not_because(config: VllmConfig) -> str:
    """Why no policy may collect attention in this engine; empty: it may.

    vLLM gives each of several ranks a copy of a KV head, and some of the query heads that attend to it.
    """
    ranks = config.parallel_config.tensor_parallel_size
    heads = evictable_kv_heads(config.model_config) if ranks > 1 else 1
    if ranks <= heads:
        return ""
    return (
        f"each of the model's {heads} KV heads is on {ranks // heads} of {ranks} tensor-parallel ranks, "
        "which see the attention of other queries and would keep other tokens"
    )
