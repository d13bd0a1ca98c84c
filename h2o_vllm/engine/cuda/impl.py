# SPDX-License-Identifier: Apache-2.0
"""Attention that scores, on top of vLLM's. Worker process.

========== ==================== ============================= ==================
row        attention            scores                        in a CUDA graph
========== ==================== ============================= ==================
no budget  vLLM                 none                          yes
evicting   vLLM, without holes  none (``window``, ``keydiff``)  yes
decode     ours                 ours, in the same pass        yes
prompt     vLLM, with its LSE   columns, from the LSE         no (attention is eager)
========== ==================== ============================= ==================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

from h2o_vllm.engine.attention import AttentionCall, ScoringImpl
from h2o_vllm.engine.cuda.batch import ScoredBatch
from h2o_vllm.engine.cuda.compat import layer_scales
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from h2o_vllm.engine.cuda.state import CudaState

__all__ = ["CudaScoringImpl", "Scales", "check_scales", "key_value_views", "paged_views"]


class Scales(NamedTuple):
    """What a number stored in 8 bits stands for, as a multiple: one float32 on the device, or ``None``."""

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: Any, query: torch.Tensor, keys: torch.Tensor) -> Scales:
        """Those of a layer, for what is in 8 bits of ``query`` and of the cache that ``keys`` are of."""
        if keys.dtype != torch.float8_e4m3fn:
            return cls()
        q_scale, k_scale, v_scale = layer_scales(layer)
        return cls(q_scale if query.dtype == torch.float8_e4m3fn else None, k_scale, v_scale)


def key_value_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each [N, BS, KH, D], of a layer's cache [N, KH, BS, 2 * D] of any strides.

    vLLM holds 8-bit numbers as bytes; they are float8_e4m3fn, as all others are refused at start-up.
    """
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values


def paged_views(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with strides that FlashAttention's TMA accepts (KH = 1)."""
    return canonicalize_singleton_dim_strides(keys), canonicalize_singleton_dim_strides(values)


def check_scales(layers: Iterable[Any]) -> None:
    """Check the scales of layers with an 8-bit cache once, at start-up.

    Raises:
        ConfigError: a checkpoint brought one per head.
    """
    in_bytes = (layer for layer in layers if layer.kv_cache.dtype == torch.uint8)
    if any(scale.numel() != 1 for layer in in_bytes for scale in layer_scales(layer)):
        raise ConfigError(
            "h2o_vllm reads an 8-bit KV cache with one scale per layer, this checkpoint has one per head"
        )


def check_softmaxes(impls: Iterable[Any]) -> None:
    """Check that all these attention layers want the same form of our kernels: the first's are warmed up.

    Raises:
        ConfigError: others would compile theirs while serving.
    """
    forms = {
        (bool(impl.logits_soft_cap), None if impl.sinks is None else impl.sinks.dtype)
        for impl in impls
    }
    if len(forms) > 1:
        raise ConfigError(
            "h2o_vllm cannot evict on GPUs where only some layers of full attention have a logits "
            "soft cap or attention sinks"
        )


class CudaScoringImpl(ScoringImpl):
    """What our GPU implementations share; they differ in how they come by the LSE."""

    scored_metadata = ScoredBatch
    _state: CudaState
    _views: tuple[torch.Tensor, torch.Tensor]
    """Keys and values of this layer's cache, [N, BS, KH, D] each; made once, as a step has many layers."""

    def bind(self, state: Any, layer: int) -> None:
        """As the base class."""
        super().bind(state, layer)
        caches = state.kv_layers
        self._views = caches.key_caches[layer], caches.value_caches[layer]

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Our kernels write the model's dtype only."""
        del quant_key
        return False

    def attend(self, call: AttentionCall, batch: ScoredBatch) -> None:
        """Stock attention for its rows, our decodes, then the scores of the prompts."""
        self._state.note_served(batch, self._layer)
        keys, values = self._views
        query, output = call.query[: batch.num_tokens], call.output[: batch.num_tokens]
        scales = Scales.of(call.layer, query, keys)
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
                *scales,
                softcap=self.logits_soft_cap,
                sinks=self.sinks,
            )
        if lse is None:
            return
        for scores, prompts in (
            (self._scores, batch.prompts),
            (self._scores, batch.maxima),
            (self._early, batch.late),
        ):
            if prompts is not None:
                kernels.add_prompt_scores(
                    query,
                    keys,
                    scores,
                    batch.block_table,
                    batch.query_start_loc,
                    batch.seq_lens,
                    lse,
                    self.scale,
                    prompts,
                    scales.query,
                    scales.key,
                    softcap=self.logits_soft_cap,
                )

    def attend_with_lse(self, call: AttentionCall, batch: ScoredBatch) -> torch.Tensor:
        """Stock attention of ``batch.stock``, and each query's log-sum-exp.

        Returns:
            [H, T], float32, natural logarithm, sinks included; defined for the prompt rows' queries.
        """
        raise NotImplementedError
