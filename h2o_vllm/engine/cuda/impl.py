# SPDX-License-Identifier: Apache-2.0
"""Attention that scores, on top of vLLM's. Worker process.

========== ==================== ============================= ==================
row        attention            scores                        in a CUDA graph
========== ==================== ============================= ==================
no budget  vLLM                 none                          yes
decode     ours                 ours, in the same pass        yes
prompt     vLLM, with its LSE   column sums, from the LSE     no (attention is eager)
========== ==================== ============================= ==================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

from h2o_vllm.engine.attention import AttentionCall, ScoringImpl
from h2o_vllm.engine.cuda.batch import ScoredBatch
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    import torch

    from h2o_vllm.engine.cuda.state import CudaState

__all__ = ["CudaScoringImpl", "key_value_views", "paged_views"]


def key_value_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each [N, BS, KH, D], of a layer's cache [N, KH, BS, 2 * D] of any strides."""
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values


def paged_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`key_value_views`, with strides that FlashAttention's TMA accepts (KH = 1)."""
    keys, values = key_value_views(kv_cache, head_size)
    return canonicalize_singleton_dim_strides(keys), canonicalize_singleton_dim_strides(values)


class CudaScoringImpl(ScoringImpl):
    """What our GPU implementations share; they differ in how they come by the LSE."""

    scored_metadata = ScoredBatch
    _state: CudaState

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Our kernels write the model's dtype only."""
        del quant_key
        return False

    def attend(self, call: AttentionCall, batch: ScoredBatch) -> None:
        """Stock attention for its rows, our decodes, then the scores of the prompts."""
        self._state.note_served(batch, self._layer)
        keys, values = key_value_views(call.kv_cache, self.head_size)
        query, output = call.query[: batch.num_tokens], call.output[: batch.num_tokens]
        lse = None
        if batch.prompt_rows is not None:
            lse = self.attend_with_lse(call, batch)
        elif batch.stock is not None:
            self.attend_stock(call, batch.stock)
        if batch.decodes:
            # After vLLM's kernel, which writes zeros for the rows of length 0.
            kernels.attend_decode(
                query,
                keys,
                values,
                self._scores,
                batch.block_table,
                self.scale,
                output,
                self._state.workspace,
            )
        if lse is not None:
            kernels.add_prompt_scores(
                query,
                keys,
                self._scores,
                batch.block_table,
                batch.query_start_loc,
                batch.seq_lens,
                lse,
                self.scale,
                batch.max_query_len,
                batch.max_seq_len,
                batch.prompt_rows,
                scored_from=batch.scored_from,
            )

    def attend_with_lse(self, call: AttentionCall, batch: ScoredBatch) -> torch.Tensor:
        """Stock attention of ``batch.stock``, and each query's log-sum-exp.

        Returns:
            [H, T], float32, natural logarithm; defined for the prompt rows' queries.
        """
        raise NotImplementedError
