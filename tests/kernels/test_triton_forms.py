# SPDX-License-Identifier: Apache-2.0
"""Warming up compiles every form of the kernels that serving can reach, and no other.

Nothing is compiled or run here: what a call launches is noted, under the key that Triton's launcher looks it
up by. ``tests/engine/cuda`` holds every step of its engines against the warm-up in the same way.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from h2o_vllm.engine.cuda import warmup
from h2o_vllm.kernels import triton as kernels
from loadtest.kernels.forms import Shape, launches

KV_HEADS, LAYERS, MAX_ROWS, MAX_TOKENS = 2, 2, 300, 1000
SHAPES = [
    Shape(4, 128, 16, torch.bfloat16), Shape(3, 64, 32, torch.float16), Shape(7, 80, 528, torch.bfloat16),
    Shape(1, 96, 128, torch.float32), Shape(4, 128, 16, torch.float8_e4m3fn),
]  # fmt: skip


class Worker:
    """Calls the kernels as the GPU worker, its metadata builder and its attention layers do."""

    def __init__(self, shape: Shape, softcap: float = 0.0, *, sinks: bool = False) -> None:
        self.block_size, self.heads, self.size = (
            shape.block_size,
            shape.group * KV_HEADS,
            shape.size,
        )
        self.dtype = shape.dtype
        blocks = 8
        kv = torch.zeros(LAYERS, blocks, KV_HEADS, self.block_size, 2 * self.size, dtype=self.dtype)
        keys, values = kv.transpose(2, 3).split(self.size, dim=-1)
        self.layers = kernels.KVLayers(list(keys), list(values), scratch_bytes=1 << 22)
        self.planes = torch.zeros(2, LAYERS, blocks, KV_HEADS, self.block_size)
        self.scores = self.planes[0]
        self.out_dtype = torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype
        self.workspace = kernels.DecodeWorkspace(
            MAX_ROWS,
            blocks * self.block_size,
            self.heads,
            KV_HEADS,
            self.out_dtype,
            self.size,
            "cpu",
            sharing_layers=LAYERS,
        )
        self.lanes = kernels.LaneTables.empty(LAYERS, blocks, KV_HEADS, MAX_ROWS, MAX_ROWS, "cpu")
        self.scales = [torch.ones(()) for _ in range(3)] if self.dtype.itemsize == 1 else [None] * 3
        self.softcap = softcap
        self.sinks = torch.zeros(self.heads, dtype=self.out_dtype) if sinks else None
        self.table = torch.zeros(MAX_ROWS, 40, dtype=torch.int32)
        self.lens = torch.zeros(MAX_ROWS, dtype=torch.int32)
        self.starts = torch.zeros(MAX_ROWS + 1, dtype=torch.int32)
        self.flags = torch.zeros(MAX_ROWS, dtype=torch.int32)

    def query(self, tokens: int, *, fused: bool) -> Tensor:
        """A part of the qkv projection's output, or a tensor of its own: after norms, say."""
        width = (self.heads + 2 * KV_HEADS if fused else self.heads) * self.size
        wide = torch.zeros(MAX_TOKENS, width, dtype=self.dtype)[:tokens, : self.heads * self.size]
        return wide.unflatten(1, (self.heads, self.size))

    def warm_up(self) -> None:
        state = SimpleNamespace(
            kv_layers=self.layers, scores=self.scores, workspace=self.workspace,
            lanes=self.lanes,
        )  # fmt: skip
        impl = SimpleNamespace(
            num_heads=self.heads, supports_quant_query_input=True,
            logits_soft_cap=self.softcap, sinks=self.sinks,
        )  # fmt: skip
        names = ("_q_scale", "_k_scale", "_v_scale")
        layer = SimpleNamespace(impl=impl, **dict(zip(names, self.scales, strict=True)))
        warmup.warm_up(cast(Any, state), layer, self.out_dtype)

    def evict(self) -> None:
        """First evictions of prompts of any length, later ones of a block; one or several in a step."""
        for candidates in range(2, 4096 // self.block_size + 4):
            for heavy in {1, max(1, candidates // 5), candidates - 1}:
                pair = list(range(heavy)), list(range(heavy, candidates))
                for pairs in ([pair], [pair, ([1], [2]), ([1, 2, 3], [4])]):
                    equal = [kernels.Compaction(*one) for one in pairs]
                    shared = [kernels.Compaction(*one, one[1], 3) for one in pairs]
                    for some, lanes in ((equal, None), (shared, self.lanes)):
                        packed = kernels.Evictions.pack(some, "cpu")
                        kernels.compact(self.layers, self.scores, packed, lanes)

    def start_tokens(self) -> None:
        """Every batch's new tokens; those of some rows alone."""
        mapping = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        for tokens in (1, 2, 15, 16, 17, 128, MAX_TOKENS):
            for slots in (mapping[:tokens], mapping[torch.arange(tokens)]):
                kernels.reset_scores(self.planes.flatten(0, 1), slots)

    def batch(self, tokens: int, rows: int, layer: int, *, fused: bool) -> kernels.LayerBatch:
        caches = self.layers.key_caches[layer], self.layers.value_caches[layer]
        tables = self.table[:rows], self.starts[: rows + 1], self.lens[:rows]
        return kernels.LayerBatch(
            self.query(tokens, fused=fused), *caches, self.scores[layer], *tables, 0.125, *self.scales,
            self.softcap, self.sinks, layer=layer,
        )  # fmt: skip

    def decode(self) -> None:
        for rows, lanes in product((1, 2, 16, 17, MAX_ROWS), (None, self.lanes)):
            tables = self.starts[: rows + 1], self.lens[:rows], self.flags[:rows]
            self.workspace.plan(*tables, self.table[:rows], self.block_size, lanes)
            for layer, fused in product(range(LAYERS), (True, False)):
                out = torch.zeros(rows, self.heads, self.size, dtype=self.out_dtype)
                batch = self.batch(rows, rows, layer, fused=fused)
                kernels.attend_decode(batch._replace(lanes=lanes), out, self.workspace)

    def score_prompts(self) -> None:
        for rows, tokens in ((1, 2), (1, 16), (2, 33), (1, MAX_TOKENS), (7, MAX_TOKENS)):
            listed = torch.zeros(rows, dtype=torch.int32)
            borders = [row * tokens // rows for row in range(rows + 1)]
            lengths = [4 * tokens] * rows
            cut = (range(rows), borders[:-1], borders[1:], lengths, lengths, KV_HEADS, "cpu")
            prompts = kernels.PromptSegments.cut(*cut)
            # As FlashAttention returns it, and as it would be after a transposition.
            sums = (torch.zeros(self.heads, tokens), torch.zeros(tokens, self.heads).T)
            out = torch.zeros(tokens, self.heads, self.size, dtype=self.out_dtype)
            for lse, layer, fused in product(sums, range(LAYERS), (True, False)):
                batch = self.batch(tokens, rows, layer, fused=fused)
                shared = batch._replace(lanes=self.lanes)
                kernels.add_prompt_scores(batch, lse, prompts)
                kernels.add_prompt_scores(shared, lse, prompts)
                kernels.attend_prompts(shared, listed, tokens, lse, out)
                kernels.attend_prompts(batch, listed, tokens, lse)

    def serve(self) -> None:
        self.evict()
        self.start_tokens()
        self.decode()
        self.score_prompts()


@pytest.mark.parametrize(
    ("shape", "softcap", "sinks"),
    [
        *(pytest.param(shape, 0.0, False, id=str(shape)) for shape in SHAPES),
        # As Gemma 2 and gpt-oss have them.
        pytest.param(SHAPES[0], 50.0, False, id="soft-cap"),
        pytest.param(SHAPES[0], 0.0, True, id="sinks"),
    ],
)
def test_serving_reaches_the_forms_that_were_warmed_up_and_no_other(
    shape: Shape, softcap: float, sinks: bool
) -> None:
    worker = Worker(shape, softcap, sinks=sinks)
    with launches(run=False) as warm:
        worker.warm_up()
    with launches(run=False) as served:
        worker.serve()
    assert served.keys() - warm.keys() == set(), "compiled while serving"
    assert warm.keys() - served.keys() == set(), "compiled for nobody"
    selects = {
        (launch.constant("CHUNK"), launch.constant("ONE_CHUNK"))
        for form, launch in served.items()
        if form.kernel == "_select" and not launch.constant("SHARES")
    }
    small = set() if shape.block_size > 512 else {(1024, True)}
    assert selects == small | {(4096, True), (4096, False)}


def test_what_triton_compiles_anew_is_another_form() -> None:
    """The keys tell apart what Triton does: constants, None, alignment, a value of 1, options."""
    worker = Worker(SHAPES[0])
    slots = torch.zeros(9, dtype=torch.int64)
    calls = [slots[:8], slots[1:]]
    with launches(run=False) as noted:
        for given in [*calls, *calls]:
            kernels.reset_scores(worker.scores, given)
    assert len(noted) == 2
    batch = worker.batch(3, 1, 0, fused=False)
    keys = batch.key_cache
    with launches(run=False) as noted:
        for tokens in (2, 3):
            for cache in (keys, keys[..., 1:], keys[:, :, :1]):
                query = torch.zeros(tokens, 4, cache.shape[3], dtype=keys.dtype)
                given = batch._replace(query=query, key_cache=cache)
                kernels.attend_prompts(given, worker.lens, tokens, torch.zeros(4, tokens))
    assert len(noted) == 3
