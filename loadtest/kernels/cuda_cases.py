# SPDX-License-Identifier: Apache-2.0
"""What :mod:`loadtest.kernels.bench_cuda` times: attention of one shape, by vLLM's kernels and by ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from h2o_vllm.kernels.triton import DecodeWorkspace, add_prompt_scores, attend_decode

SHAPES = {
    "8B": (32, 8, 128),
    "8B tp=4": (8, 2, 128),
    "7B G=7": (28, 4, 128),
}  # q heads, kv heads, D
BLOCK_SIZE = 16
ROTATED = 512 << 20  # bytes of all layers; ten times an H200's L2 cache
FA3_GRAPH_SPLITS = 32  # what vLLM's FlashAttention backend uses in full CUDA graphs

Call = Callable[[int], None]
"""One layer's attention, or scores, by the layer's number."""


@dataclass
class Case:
    """``requests`` sequences of ``length`` tokens, the last ``queries`` of each as queries."""

    shape: str
    requests: int
    length: int
    queries: int = 1

    def __post_init__(self) -> None:
        self.heads, self.kv_heads, self.size = SHAPES[self.shape]
        self.scale = self.size**-0.5
        self.kv_bytes = self.requests * self.length * self.kv_heads * 4 * self.size
        self.score_bytes = 8 * self.requests * self.length * self.kv_heads
        self.layers = max(2, min(32, -(-ROTATED // self.kv_bytes)))

    def build(self) -> None:
        gen = torch.Generator("cuda").manual_seed(0)
        per_row = -(-self.length // BLOCK_SIZE)
        blocks = self.requests * per_row + 1
        shape = (self.layers, blocks, BLOCK_SIZE, self.kv_heads, 2 * self.size)
        kv = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=gen)
        self.keys, self.values = kv.split(self.size, dim=-1)
        self.scores = torch.zeros(self.layers, blocks, self.kv_heads, BLOCK_SIZE, device="cuda")
        ids = torch.randperm(blocks - 1, generator=gen, device="cuda") + 1
        self.table = ids.view(self.requests, per_row).int()
        self.lens = torch.full((self.requests,), self.length, dtype=torch.int32, device="cuda")
        self.starts = (
            torch.arange(self.requests + 1, dtype=torch.int32, device="cuda") * self.queries
        )
        tokens = self.requests * self.queries
        self.query = torch.randn(
            tokens, self.heads, self.size, generator=gen, device="cuda"
        ).bfloat16()
        self.out = torch.empty_like(self.query)
        self.lse = torch.zeros(self.heads, tokens, device="cuda")

    def flash(self) -> Call:
        """vLLM's FlashAttention 3, called as its backend does in a full CUDA graph; leaves ``lse``."""
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )

        splits = FA3_GRAPH_SPLITS if self.queries == 1 else 0
        plan = get_scheduler_metadata(
            batch_size=self.requests, max_seqlen_q=self.queries, max_seqlen_k=self.length,
            num_heads_q=self.heads, num_heads_kv=self.kv_heads, headdim=self.size,
            cache_seqlens=self.lens, qkv_dtype=torch.bfloat16, cu_seqlens_q=self.starts,
            page_size=BLOCK_SIZE, causal=True, window_size=(-1, -1), num_splits=splits,
        )  # fmt: skip

        def call(layer: int) -> None:
            result = flash_attn_varlen_func(
                q=self.query, k=self.keys[layer], v=self.values[layer], out=self.out,
                cu_seqlens_q=self.starts, max_seqlen_q=self.queries, seqused_k=self.lens,
                max_seqlen_k=self.length, softmax_scale=self.scale, causal=True,
                block_table=self.table, scheduler_metadata=plan, fa_version=3, num_splits=splits,
                return_softmax_lse=self.queries > 1,
            )  # fmt: skip
            if self.queries > 1:
                self.lse = result[1]

        return call

    def unified(self) -> Call:
        """vLLM's Triton attention, with the buffers that its backend gives it."""
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        segments, threshold = 16, 128 // self.kv_heads
        shape = (max(threshold, 1), self.heads, segments)
        parts = torch.empty(*shape, self.size, device="cuda")
        highest, sums = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")
        return lambda layer: unified_attention(
            q=self.query, k=self.keys[layer], v=self.values[layer], out=self.out,
            cu_seqlens_q=self.starts, max_seqlen_q=self.queries, seqused_k=self.lens,
            max_seqlen_k=self.length, softmax_scale=self.scale, causal=True, window_size=(-1, -1),
            block_table=self.table, softcap=0, q_descale=None, k_descale=None, v_descale=None,
            seq_threshold_3D=threshold, num_par_softmax_segments=segments,
            softmax_segm_output=parts, softmax_segm_max=highest, softmax_segm_expsum=sums,
        )  # fmt: skip

    def ours(self) -> Call:
        if self.queries > 1:
            return lambda layer: add_prompt_scores(
                self.query, self.keys[layer], self.scores[layer], self.table, self.starts,
                self.lens, self.lse, self.scale, self.queries, self.length,
            )  # fmt: skip
        blocks = self.keys.shape[1]
        workspace = DecodeWorkspace(
            self.requests, blocks * BLOCK_SIZE, self.heads, self.kv_heads, torch.bfloat16, self.size,
            "cuda",
        )  # fmt: skip
        workspace.plan(self.starts, self.lens)
        return lambda layer: attend_decode(
            self.query, self.keys[layer], self.values[layer], self.scores[layer], self.table,
            self.scale, self.out, workspace,
        )  # fmt: skip

    def contestants(self) -> dict[str, Call]:
        """Stock first: others are given as multiples of it."""
        if self.queries > 1:  # ours computes the scores only, after stock's attention
            return {"fa3": self.flash(), "ours": self.ours()}
        return {"fa3": self.flash(), "unified": self.unified(), "ours": self.ours()}
