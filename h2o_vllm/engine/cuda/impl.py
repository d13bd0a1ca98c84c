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

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionImpl

from h2o_vllm.engine.binding import refuse_unscorable
from h2o_vllm.engine.cuda.batch import ScoredBatch
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from h2o_vllm.engine.cuda.state import CudaState

__all__ = ["ScoringImpl", "key_value_views"]


def key_value_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each [N, BS, KH, D], of a layer's cache [N, KH, BS, 2 * D] of any strides."""
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values


class ScoringImpl(AttentionImpl[Any]):
    """Stands before one of vLLM's implementations in the line of bases. Stock until :meth:`bind`.

    ``scale``, ``head_size`` and what :func:`.refuse_unscorable` reads are the base's.
    """

    scale: float
    head_size: int
    _state: CudaState | None = None

    def bind(self, state: CudaState, layer: int) -> None:
        """Take the worker's state.

        Args:
            layer: index of this layer among the evictable ones.

        Raises:
            ConfigError: this layer's attention is of a kind our kernels do not compute.
        """
        refuse_unscorable(self)
        self._state, self._layer = state, layer

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Our kernels write the model's dtype only."""
        del quant_key
        return False

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the base class; also adds the scored rows' probabilities to the scores."""
        stock = super().forward
        scales = (output_scale, output_block_scale)
        if not isinstance(attn_metadata, ScoredBatch):
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        batch, state = attn_metadata, self._state
        assert state is not None
        state.note_served(batch, self._layer)
        keys, values = key_value_views(kv_cache, self.head_size)
        ours = (query[: batch.num_tokens], output[: batch.num_tokens])
        lse = None
        if batch.prompt_rows is not None:
            lse = self.attend_with_lse(layer, query, key, value, kv_cache, batch, output)
        elif batch.stock is not None:
            stock(layer, query, key, value, kv_cache, batch.stock, output, *scales)
        if batch.decodes:
            # After vLLM's kernel, which writes zeros for the rows of length 0.
            kernels.attend_decode(
                ours[0],
                keys,
                values,
                state.scores[self._layer],
                batch.block_table,
                self.scale,
                ours[1],
                state.workspace,
            )
        if lse is not None:
            kernels.add_prompt_scores(
                ours[0],
                keys,
                state.scores[self._layer],
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
        return output

    def attend_with_lse(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: ScoredBatch,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """vLLM's attention of ``batch.stock``, and each query's log-sum-exp.

        Returns:
            [H, T], float32, natural logarithm; defined for the prompt rows' queries.
        """
        raise NotImplementedError


def paged_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`key_value_views`, with strides that FlashAttention's TMA accepts (KH = 1)."""
    keys, values = key_value_views(kv_cache, head_size)
    return canonicalize_singleton_dim_strides(keys), canonicalize_singleton_dim_strides(values)
