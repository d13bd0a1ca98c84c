# SPDX-License-Identifier: Apache-2.0
"""Our attention backends, each built on one of vLLM's; :mod:`.choice` chooses one. Worker process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from h2o_vllm.engine.cuda.builder import ScoringBuilder
from h2o_vllm.engine.cuda.impl import CudaScoringImpl, Scales, lse_for, paged_views
from h2o_vllm.engine.worker.attention import ScoringBackend
from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import triton as kernels

if TYPE_CHECKING:
    from h2o_vllm.engine.cuda.batch import ScoredBatch
    from h2o_vllm.engine.worker.attention import AttentionCall

BACKEND = AttentionBackendEnum.CUSTOM.name
"""Value of ``--attention-backend`` with which vLLM binds our backend."""

FLASH_VERSIONS = (2, 3, 4)
"""FlashAttention versions whose source has been checked: the LSE with block tables, and rows of length 0.

For rows of length 0, versions 2 and 3 write zeros. Version 4 may write anything, NaN included: our decode
kernel runs after it and writes each such row.
"""


_TILE = 128
"""Queries times q heads per KV head of one tile of FlashAttention 4."""


class CudaScoringBackend(ScoringBackend):
    """Common base of our backends on GPUs."""

    @staticmethod
    def get_name() -> str:
        """Name in ``AttentionBackendEnum``, under which layers look the backend up."""
        return BACKEND


class H2OFlashBuilder(ScoringBuilder, flash_attn.FlashAttentionMetadataBuilder):
    """FlashAttention's builder. Its ahead-of-time schedule gets the lengths that vLLM attends."""


class H2OFlashImpl(CudaScoringImpl, flash_attn.FlashAttentionImpl):
    """FlashAttention, which returns the LSE."""

    stock = flash_attn.FlashAttentionImpl
    vllm_flash_attn_version: int | None
    fa4_hd256: bool
    _paged_views: tuple[torch.Tensor, torch.Tensor]

    def bind(self, state: Any, layer: int) -> None:
        """As the base class.

        Raises:
            ConfigError: as the base class; or vLLM chose a FlashAttention version or kernel that this class
                does not support.
        """
        version = self.vllm_flash_attn_version
        if version not in FLASH_VERSIONS or self.fa4_hd256:
            kernel = "FlashAttention 4's kernel for" if self.fa4_hd256 else "for"
            raise ConfigError(
                f"h2o_vllm cannot score with FlashAttention {version} ({kernel} head size "
                f"{self.head_size}): set H2O_CUDA_BACKEND=triton_attn, or attention_config's "
                "flash_attn_version to 2"
            )
        if version == 4 and self.sinks is not None:
            raise ConfigError(
                "h2o_vllm is not tested with attention sinks in the log-sum-exp of FlashAttention 4: "
                "set H2O_CUDA_BACKEND=triton_attn"
            )
        super().bind(state, layer)
        self._paged_views = paged_views(*self._views)

    def attend_with_lse(self, call: AttentionCall, batch: ScoredBatch) -> torch.Tensor:
        """The call of ``FlashAttentionImpl.forward`` for causal attention, with the LSE returned.

        FlashAttention 3 includes sinks in the LSE (``finalize_aux`` in its ``softmax.h``). With version 2
        vLLM refuses sinks.
        """
        assert batch.stock is not None
        return self._attend_with_lse(call.layer, call.query, call.output, batch.stock)

    def warm_up(self, layer: Any, query_dtype: torch.dtype, dtype: torch.dtype) -> None:
        """Compile the variants of FlashAttention 4 that only we call: those with the log-sum-exp.

        vLLM contains compiled versions 2 and 3. Version 4 compiles a variant at its first call, which takes
        seconds: the first scored prompt would stall all requests. One tile and two are different variants, as
        are whole rows and split rows. Reads the null block, and writes only temporary tensors.

        Args:
            query_dtype, dtype: dtypes of queries and of outputs.
        """
        if self.vllm_flash_attn_version != 4:
            return
        _, block_size, kv_heads, size = self._paged_views[0].shape
        device = self._paged_views[0].device
        for queries in (1, _TILE // (self.num_heads // kv_heads) + 1):
            out = torch.zeros(queries, self.num_heads, size, dtype=dtype, device=device)
            blocks = -(-queries // block_size)
            # Rows are split if they are few and ``max_seq_len`` is large.
            for longest in (queries, 64 * _TILE):
                stock = SimpleNamespace(
                    query_start_loc=torch.tensor([0, queries], dtype=torch.int32, device=device),
                    max_query_len=queries,
                    seq_lens=torch.full((1,), queries, dtype=torch.int32, device=device),
                    max_seq_len=longest,
                    block_table=torch.zeros(1, blocks, dtype=torch.int32, device=device),
                    scheduler_metadata=None,
                    max_num_splits=0,
                )
                self._attend_with_lse(layer, out.to(query_dtype), out, stock)

    def _attend_with_lse(
        self, layer: Any, query: torch.Tensor, output: torch.Tensor, stock: Any
    ) -> torch.Tensor:
        keys, values = self._paged_views
        # The kernels take one scale per row and KV head.
        shape = (stock.query_start_loc.shape[0] - 1, self.num_kv_heads)
        scales = Scales.of(layer, query, keys)
        descales = [None if scale is None else scale.expand(shape) for scale in scales]
        _, lse = flash_attn.flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=stock.query_start_loc,
            max_seqlen_q=stock.max_query_len,
            seqused_k=stock.seq_lens,
            max_seqlen_k=stock.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            block_table=stock.block_table,
            softcap=self.logits_soft_cap,
            s_aux=self.sinks,
            return_softmax_lse=True,
            scheduler_metadata=stock.scheduler_metadata,
            fa_version=self.vllm_flash_attn_version,
            num_splits=stock.max_num_splits,
            q_descale=descales[0],
            k_descale=descales[1],
            v_descale=descales[2],
        )
        return lse


class H2OFlashBackend(CudaScoringBackend, flash_attn.FlashAttentionBackend):
    """vLLM's FlashAttention backend with our builder, implementation and KV cache spec."""

    impl_cls, builder_cls = H2OFlashImpl, H2OFlashBuilder


class H2OTritonBuilder(ScoringBuilder, triton_attn.TritonAttentionMetadataBuilder):
    """The Triton backend's builder."""


class H2OTritonImpl(CudaScoringImpl, triton_attn.TritonAttentionImpl):
    """The Triton backend. It returns no LSE, so computing it takes another pass over the prompt's keys."""

    stock = triton_attn.TritonAttentionImpl

    def attend_with_lse(self, call: AttentionCall, batch: ScoredBatch) -> torch.Tensor:
        """Stock attention, then the LSE of the prompt rows."""
        assert batch.prompt_rows is not None
        self.attend_stock(call, batch.stock)
        lse, ours = lse_for(call.query), self._batch(call, batch).of_equal_heads
        kernels.attend_prompts(ours, batch.prompt_rows, batch.max_query_len, lse)
        return lse


class H2OTritonBackend(CudaScoringBackend, triton_attn.TritonAttentionBackend):
    """vLLM's Triton backend with our builder, implementation and KV cache spec."""

    impl_cls, builder_cls = H2OTritonImpl, H2OTritonBuilder
