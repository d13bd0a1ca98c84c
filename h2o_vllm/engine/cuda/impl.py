# SPDX-License-Identifier: Apache-2.0
"""Attention that collects scores, built on vLLM's. Worker process.

=============== =================== ================================ ====================
row             attention           scores                           in a CUDA graph
=============== =================== ================================ ====================
no budget       vLLM                none                             yes
evicts          vLLM, without holes none: its policy needs none now  yes
scored decode   ours                ours, in the same pass           yes
scored prompt   vLLM, with its LSE  column sums, from the LSE        no (eager attention)
shared heads    ours                as above, if any                 decodes
=============== =================== ================================ ====================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

from h2o_vllm.engine.cuda.batch import ScoredBatch
from h2o_vllm.engine.cuda.compat import layer_scales
from h2o_vllm.engine.worker.attention import AttentionCall, ScoringImpl
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from h2o_vllm.engine.cuda.state import CudaState


class Scales(NamedTuple):
    """Scales of 8-bit tensors, each one float32 on the device, or ``None`` for a tensor of 16 or 32 bits."""

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: Any, query: torch.Tensor, keys: torch.Tensor) -> Scales:
        """The scales of a layer for those of ``query`` and the cache of ``keys`` that have 8 bits."""
        if keys.dtype != torch.float8_e4m3fn:
            return cls()
        q_scale, k_scale, v_scale = layer_scales(layer)
        return cls(q_scale if query.dtype == torch.float8_e4m3fn else None, k_scale, v_scale)


def key_value_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's cache, [N, KH, BS, 2 * D] with any strides: keys and values, [N, BS, KH, D] each."""
    keys, values = numbers_of(kv_cache).transpose(1, 2).split(head_size, dim=-1)
    return keys, values


def numbers_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache as the numbers that it holds.

    vLLM stores 8-bit numbers as bytes. They are float8_e4m3fn: other 8-bit dtypes are refused at start-up.
    """
    return kv_cache.view(torch.float8_e4m3fn) if kv_cache.dtype == torch.uint8 else kv_cache


def lse_for(query: torch.Tensor) -> torch.Tensor:
    """Room for the log-sum-exps of queries [T, H, D]: [H, T], float32."""
    tokens, heads, _ = query.shape
    return torch.empty(heads, tokens, dtype=torch.float32, device=query.device)


def paged_views(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with strides that FlashAttention's TMA accepts, also for KH = 1."""
    return canonicalize_singleton_dim_strides(keys), canonicalize_singleton_dim_strides(values)


def check_scales(layers: Iterable[Any]) -> None:
    """Check, at start-up, that layers with an 8-bit cache have one scale each.

    Raises:
        ConfigError: the checkpoint has one scale per head.
    """
    in_bytes = (layer for layer in layers if layer.kv_cache.dtype == torch.uint8)
    if any(scale.numel() != 1 for layer in in_bytes for scale in layer_scales(layer)):
        raise ConfigError(
            "h2o_vllm reads an 8-bit KV cache with one scale per layer, this checkpoint has one per head"
        )


def kv_scales(layers: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales of keys and of values, [L] each; ``None`` if the cache does not have 8 bits."""
    if layers[0].kv_cache.dtype != torch.uint8:
        return None
    _, keys, values = (torch.stack(one) for one in zip(*map(layer_scales, layers), strict=True))
    return keys.flatten(), values.flatten()


def check_softmaxes(impls: Iterable[Any]) -> None:
    """Check that all attention layers use one variant of our kernels: the warm-up compiles only that one.

    Raises:
        ConfigError: some layers would compile kernels while serving.
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
    """Common base of our GPU implementations, which differ in how they compute the LSE."""

    scored_metadata = ScoredBatch
    _state: CudaState
    _views: tuple[torch.Tensor, torch.Tensor]
    """Keys and values of this layer's cache, [N, BS, KH, D] each; views that are made once."""

    def bind(self, state: Any, layer: int) -> None:
        """As the base class."""
        super().bind(state, layer)
        caches = state.kv_layers
        self._views = caches.key_caches[layer], caches.value_caches[layer]

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """``False``: our kernels write only the model's dtype."""
        del quant_key
        return False

    def attend(self, call: AttentionCall, batch: ScoredBatch) -> None:
        """Run stock attention for vLLM's rows, then our decodes, then the scores of prompts."""
        self._state.note_served(batch, self)
        if len(call.query) > batch.num_tokens:
            without_padding = slice(batch.num_tokens)
            call = call._replace(
                query=call.query[without_padding], output=call.output[without_padding]
            )
        ours = self._batch(call, batch)
        lse = None
        if batch.prompt_rows is not None:
            lse = self.attend_with_lse(call, batch)
        elif batch.stock is not None:
            self.attend_stock(call, batch.stock)
        if batch.decodes:
            # After vLLM's kernel, which writes zeros for the rows of length 0.
            kernels.attend_decode(ours, call.output, self._state.workspace, cut=batch.cut)
        if (shared := batch.shared_prompts) is not None:
            # vLLM's kernels cannot attend them.
            sums = lse_for(ours.query)
            kernels.attend_prompts(ours, shared.rows, shared.max_query_len, sums, call.output)
            if shared.scored is not None:
                kernels.add_prompt_scores(ours, sums, shared.scored)
        if lse is not None and batch.prompts is not None:
            kernels.add_prompt_scores(ours.of_equal_heads, lse, batch.prompts)

    def _batch(self, call: AttentionCall, batch: ScoredBatch) -> kernels.LayerBatch:
        """What our kernels take of a call without padding."""
        scales = Scales.of(call.layer, call.query, self._views[0])
        return kernels.LayerBatch(
            call.query, *self._views, self._scores, batch.block_table, batch.query_start_loc,
            batch.seq_lens, self.scale, *scales, self.logits_soft_cap, self.sinks, batch.lanes, self._layer,
        )  # fmt: skip

    def attend_with_lse(self, call: AttentionCall, batch: ScoredBatch) -> torch.Tensor:
        """Run stock attention for ``batch.stock``, and return the log-sum-exp of each query.

        Args:
            call: without padding.

        Returns:
            [H, T], float32, natural logarithm, sinks included; defined for the queries of prompt rows.
        """
        raise NotImplementedError
