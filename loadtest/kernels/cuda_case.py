# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU as its benchmarks time it: a batch of one shape, and the kernels for it. bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from h2o_vllm.kernels.triton import (
    DecodeWorkspace,
    LaneTables,
    LayerBatch,
    PromptSegments,
    add_prompt_scores,
    attend_decode,
)
from loadtest.kernels.lanes import half_shared

SHAPES = {
    "8B": (32, 8, 128),
    "8B tp=4": (8, 2, 128),
    "7B G=7": (28, 4, 128),
}
"""Q heads, KV heads, D."""
BLOCK_SIZE = 16
LAYOUTS = ("NHD", "HND")
"""Of a block: token by token, which is vLLM's default, or KV head by KV head."""
_ROTATED = 512 << 20
"""Bytes of all layers; ten times an H200's L2 cache."""
_FA3_GRAPH_SPLITS = 32
"""What vLLM's FlashAttention backend uses in full CUDA graphs."""

LayerCall = Callable[[int], object]
"""One layer's attention, or scores, by the layer's number."""


@dataclass
class Case:
    """``requests`` sequences of ``length`` tokens, the last ``queries`` of each as queries.

    ``layout``: of the KV cache, as vLLM's ``VLLM_KV_CACHE_LAYOUT`` names it.
    """

    shape: str
    requests: int
    length: int
    queries: int = 1
    layout: str = LAYOUTS[0]

    def __post_init__(self) -> None:
        self.heads, self.kv_heads, self.size = SHAPES[self.shape]
        self.scale = self.size**-0.5
        self.kv_bytes = self.requests * self.length * self.kv_heads * 4 * self.size
        # Read and written.
        self.sum_bytes = 8 * self.requests * self.length * self.kv_heads
        self.layers = max(2, min(32, -(-_ROTATED // self.kv_bytes)))

    def build(self) -> None:
        """Make its tensors."""
        gen = torch.Generator("cuda").manual_seed(0)
        per_row = -(-self.length // BLOCK_SIZE)
        blocks = self.requests * per_row + 1
        inner = (BLOCK_SIZE, self.kv_heads) if self.layout == "NHD" else (self.kv_heads, BLOCK_SIZE)
        shape = (self.layers, blocks, *inner, 2 * self.size)
        kv = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=gen)
        kv = kv if self.layout == "NHD" else kv.transpose(2, 3)
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

    def flash(self) -> LayerCall:
        """VLLM's FlashAttention 3, called as its backend does in a full CUDA graph; leaves ``lse``."""
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )

        splits = _FA3_GRAPH_SPLITS if self.queries == 1 else 0
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

    def unified(self) -> LayerCall:
        """VLLM's Triton attention, with the buffers that its backend gives it."""
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

    def ours(self, *, shared: bool = False) -> LayerCall:
        """Attention with scores of one token; of prompts the scores alone, after stock's attention.

        Args:
            shared: whether KV heads share the first half of each row's blocks; of one token.
        """
        if self.queries > 1:
            prompts = PromptSegments.cut(
                range(self.requests), self.starts[:-1].tolist(), self.starts[1:].tolist(),
                self.lens.tolist(), self.lens.tolist(), self.kv_heads, "cuda",
            )  # fmt: skip
            return lambda layer: add_prompt_scores(self.given(layer), self.lse, prompts)
        workspace, lanes = self._workspace(shared=shared)
        self._plan(workspace, lanes)
        return lambda layer: attend_decode(self.given(layer, lanes), self.out, workspace)

    def given(self, layer: int, lanes: LaneTables | None = None) -> LayerBatch:
        """One layer as our kernels take it."""
        return LayerBatch(
            self.query, self.keys[layer], self.values[layer], self.scores[layer], self.table, self.starts,
            self.lens, self.scale, lanes=lanes, layer=layer,
        )  # fmt: skip

    def _workspace(self, *, shared: bool) -> tuple[DecodeWorkspace, LaneTables | None]:
        blocks = self.keys.shape[1]
        workspace = DecodeWorkspace(
            self.requests, blocks * BLOCK_SIZE, self.heads, self.kv_heads, torch.bfloat16, self.size,
            "cuda", sharing_layers=self.layers if shared else 0,
        )  # fmt: skip
        lanes = half_shared(self.table, self.layers, blocks, self.kv_heads) if shared else None
        return workspace, lanes

    def _plan(self, workspace: DecodeWorkspace, lanes: LaneTables | None) -> None:
        flags = torch.zeros_like(self.lens)
        workspace.plan(self.starts, self.lens, flags, self.table, BLOCK_SIZE, lanes)

    def contestants(self) -> dict[str, LayerCall]:
        """Stock first: others are given as multiples of it.

        In ``lanes`` KV heads share slots.
        """
        ours = {"ours": self.ours()}
        if self.queries > 1:
            return {"fa3": self.flash(), **ours}
        ours["lanes"] = self.ours(shared=True)
        return {"fa3": self.flash(), "unified": self.unified(), **ours}
