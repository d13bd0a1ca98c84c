# SPDX-License-Identifier: Apache-2.0
"""Compiles the variants of FlashAttention 4 that only our backend calls. Worker process.

vLLM contains compiled kernels of FlashAttention 2 and 3. Version 4 compiles each variant at its first call,
which takes seconds. With the log-sum-exp it is another variant than vLLM's own, so vLLM's warm-up does not
compile it, and the first scored prompt would stall all requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends import flash_attn

from h2o_vllm.engine.cuda.impl import Scales

if TYPE_CHECKING:
    from h2o_vllm.engine.cuda.backends import H2OFlashImpl

_TILE = 128
"""Queries times q heads per KV head of one tile. With two tiles another variant is compiled."""


def warm_up_flash(
    impl: H2OFlashImpl,
    layer: Any,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    """Call attention with the log-sum-exp: with one tile and with two, for whole rows and for split rows.

    Reads the null block, and writes only temporary tensors. Does nothing for other versions.

    Args:
        impl: the attention of ``layer``. keys, values: the layer's cache, [N, BS, KH, D], as attention
            passes them.
        query_dtype, dtype: dtypes of queries and of outputs.
    """
    if impl.vllm_flash_attn_version != 4:
        return
    block_size, kv_heads, size = keys.shape[1:]
    group, device = impl.num_heads // kv_heads, keys.device
    for queries in (1, _TILE // group + 1):
        table = torch.zeros(1, -(-queries // block_size), dtype=torch.int32, device=device)
        out = torch.zeros(queries, impl.num_heads, size, dtype=dtype, device=device)
        query = out.to(query_dtype)
        descales = [
            None if scale is None else scale.expand(1, kv_heads)
            for scale in Scales.of(layer, query, keys)
        ]
        # FlashAttention splits rows if they are few and ``max_seqlen_k`` is large.
        for longest in (queries, 64 * _TILE):
            flash_attn.flash_attn_varlen_func(
                q=query,
                k=keys,
                v=values,
                out=out,
                cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32, device=device),
                max_seqlen_q=queries,
                seqused_k=torch.full((1,), queries, dtype=torch.int32, device=device),
                max_seqlen_k=longest,
                softmax_scale=impl.scale,
                causal=True,
                block_table=table,
                softcap=impl.logits_soft_cap,
                return_softmax_lse=True,
                fa_version=4,
                q_descale=descales[0],
                k_descale=descales[1],
                v_descale=descales[2],
            )
