# SPDX-License-Identifier: Apache-2.0
"""Attention that scores, on top of vLLM's. Worker process.

========== ==================== ============================= ==================
row        attention            scores                        in a CUDA graph
========== ==================== ============================= ==================
no budget  vLLM                 none                          yes
evicting   vLLM, without holes  none (``window``, ``keydiff``)  yes
decode     ours                 ours, in the same pass        yes
prompt     vLLM, with its LSE   columns, from the LSE         no (attention is eager)
shared     ours                 as above, if any              decodes
========== ==================== ============================= ==================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

from h2o_vllm.engine.cuda.batch import ScoredBatch, ScoredPrompts, SharedPrompts
from h2o_vllm.engine.cuda.compat import layer_scales
from h2o_vllm.engine.worker.attention import AttentionCall, ScoringImpl
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from h2o_vllm.engine.cuda.state import CudaState

__all__ = [
    "CudaScoringImpl",
    "Scales",
    "check_scales",
    "check_softmaxes",
    "key_value_views",
    "kv_scales",
    "paged_views",
]


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


def kv_scales(layers: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What a stored 1 stands for, of keys and of values, [L] each; ``None`` where that is 1."""
    if layers[0].kv_cache.dtype != torch.uint8:
        return None
    _, keys, values = (torch.stack(one) for one in zip(*map(layer_scales, layers), strict=True))
    return keys.flatten(), values.flatten()


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
                lanes=batch.lanes,
                layer=self._layer,
            )
        if batch.shared_prompts is not None:
            self._attend_shared(query, output, batch, batch.shared_prompts, scales)
        if lse is not None:
            self._add_scores(query, batch, batch.prompts, lse, scales)

    def _attend_shared(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        batch: ScoredBatch,
        prompts: SharedPrompts,
        scales: Scales,
    ) -> None:
        """Attention, and scores, of rows with several queries that vLLM's kernels cannot read."""
        assert batch.lanes is not None
        tokens, heads, _ = query.shape
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
        kernels.attend_shared_prompts(
            query,
            *self._views,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            self.scale,
            output,
            lse,
            prompts.max_query_len,
            prompts.rows,
            batch.lanes,
            self._layer,
            *scales,
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
        )
        self._add_scores(query, batch, prompts.scored, lse, scales, batch.lanes)

    def _add_scores(
        self,
        query: torch.Tensor,
        batch: ScoredBatch,
        scored: ScoredPrompts,
        lse: torch.Tensor,
        scales: Scales,
        lanes: kernels.LaneTables | None = None,
    ) -> None:
        for scores, prompts in ((self._scores, scored.every), (self._early, scored.late)):
            if prompts is not None:
                kernels.add_prompt_scores(
                    query,
                    self._views[0],
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
                    lanes=lanes,
                    layer=self._layer,
                )

    def attend_with_lse(self, call: AttentionCall, batch: ScoredBatch) -> torch.Tensor:
        """Stock attention of ``batch.stock``, and each query's log-sum-exp.

        Returns:
            [H, T], float32, natural logarithm, sinks included; defined for the prompt rows' queries.
        """
        raise NotImplementedError
