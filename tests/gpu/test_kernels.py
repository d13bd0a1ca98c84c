# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel against its reference at the sizes it is made for, on a real GPU."""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from h2o_vllm.kernels.triton import EVICTING, SCORED, Compaction, DecodeWorkspace
from tests.kernels.triton.cases import DTYPES, Batch, bits, make_batch, shapes
from tests.kernels.triton.decode_laws import check_decode, decode, plan, workspace_for
from tests.kernels.triton.evict_laws import SPECIAL, check_compaction, make_layers
from tests.kernels.triton.prompt_laws import check_prompt, check_prompt_alone
from tests.kernels.triton.table_laws import check_tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none"),
]

SHAPES = shapes(
    (1, 8, 64, 16, "NHD"), (3, 3, 64, 32, "HND"), (4, 8, 128, 16, "NHD"), (4, 8, 128, 16, "HND"),
    (7, 4, 128, 16, "NHD"), (8, 8, 128, 128, "HND"), (7, 4, 80, 16, "NHD"), (8, 2, 96, 64, "NHD"),
    (4, 2, 256, 32, "NHD"), (16, 1, 64, 128, "NHD"),
)  # fmt: skip
LONG = [1, 16, 17, 8191, 0, 300, 2048, 1000, 63, 64, 65, 32000]


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_decode_equals_the_reference(shape: Any, dtype: str) -> None:
    batch = make_batch(LONG, dtype=DTYPES[dtype], strided=True, device="cuda", **shape)
    check_decode(batch, workspace_for(batch, spare=None))


@pytest.mark.parametrize("query_dtype", [None, torch.bfloat16], ids=["q8", "q16"])
def test_an_8_bit_cache_is_served(query_dtype: torch.dtype | None) -> None:
    scales = (0.5, 1.5, 0.75) if query_dtype is None else (1.0, 1.5, 0.75)
    for queries in ([1] * 4, [900, 700, 2, 30]):
        batch = make_batch(
            [900, 3000, 2, 64], queries, group=4, kv_heads=8, size=128, dtype=torch.float8_e4m3fn,
            query_dtype=query_dtype, scales=scales, device="cuda",
        )  # fmt: skip
        if max(queries) > 1:
            check_prompt(batch)
        else:
            check_decode(batch, workspace_for(batch, spare=None))
    caches, scores = make_layers(torch.float8_e4m3fn, 128, 16, blocks=40, kv_heads=8, device="cuda")
    check_compaction(caches, scores, [Compaction(range(1, 9), range(9, 30))])


def test_decode_is_the_same_each_time() -> None:
    batch = make_batch(LONG, group=4, kv_heads=8, size=128, dtype=torch.bfloat16, device="cuda")
    first, scores = batch.out(), batch.scores.clone()
    decode(batch, first, scores, workspace_for(batch, spare=None))
    for _ in range(20):
        again, scores_again = batch.out(), batch.scores.clone()
        decode(batch, again, scores_again, workspace_for(batch, spare=None))
        assert torch.equal(bits(first), bits(again))
        assert torch.equal(bits(scores), bits(scores_again))


def test_a_graph_serves_other_lengths_and_fewer_rows() -> None:
    """Captured once with padding only; replayed on what is planned outside of it."""
    lengths, queries = [900, 0, 64, 5000, 17, 0, 0, 0], [1, 0, 1, 1, 1, 0, 0, 0]
    batch = make_batch(
        lengths, queries, group=4, kv_heads=8, size=128, dtype=torch.bfloat16, device="cuda"
    )
    workspace = workspace_for(batch, spare=None, rows=32)
    nothing = make_batch(lengths, queries, group=4, kv_heads=8, size=128, device="cuda")
    nothing.seq_lens.zero_()
    scores, out = batch.scores.clone(), batch.out()
    _captured(batch, scores, out, workspace, nothing).replay()
    assert torch.equal(bits(scores), bits(batch.scores))
    assert out.isnan().all()
    graph = _captured(batch, scores, out, workspace, nothing)
    want, want_scores = batch.out(), batch.scores.clone()
    decode(batch, want, want_scores, workspace_for(batch, spare=None, rows=32))
    plan(batch, workspace)
    graph.replay()
    assert torch.equal(bits(out), bits(want))
    assert torch.equal(bits(scores), bits(want_scores))
    fewer = {"query_start_loc": batch.query_start_loc[:3], "seq_lens": batch.seq_lens[:2]}
    plan(dataclasses.replace(batch, **fewer), workspace)
    scores.copy_(batch.scores)
    out.fill_(float("nan"))
    graph.replay()
    # Cut otherwise than among the others: the sums round otherwise.
    torch.testing.assert_close(out[0], want[0], rtol=0.01, atol=0.001)
    assert out[1:].isnan().all()


def _captured(
    batch: Batch,
    scores: torch.Tensor,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    padding: Batch,
) -> torch.cuda.CUDAGraph:
    from h2o_vllm.kernels.triton import attend_decode

    def step() -> None:
        attend_decode(batch.given(scores), out, workspace)

    plan(padding, workspace)
    step()  # compiles outside of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_prompt_scores_equal_the_reference(shape: Any, dtype: str) -> None:
    lengths, queries = [1000, 2, 900, 129, 0, 777], [1000, 2, 150, 128, 0, 1]
    options = {"dtype": DTYPES[dtype], "strided": True, "device": "cuda"}
    check_prompt(make_batch(lengths, queries, **options, **shape))


def test_a_prompt_does_not_depend_on_how_it_is_launched() -> None:
    check_prompt_alone(
        make_batch(
            [5000, 60, 2500], [3000, 50, 2500], group=4, kv_heads=2, size=128, dtype=torch.bfloat16,
            device="cuda",
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_compaction_equals_the_reference(layout: str, dtype: str) -> None:
    caches, scores = make_layers(
        DTYPES[dtype], 128, 16, layout, layers=8, blocks=400, kv_heads=8, device="cuda"
    )
    order = (torch.randperm(399, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    evictions = [
        Compaction(order[:50], order[50:250]),
        Compaction(order[250:251], order[251:300]),
        Compaction(order[300:398], order[398:]),
    ]
    check_compaction(caches, scores, evictions)
    check_compaction(caches, scores, evictions, scratch_bytes=8 * 8 * 1600)
    picks = torch.randint(0, len(SPECIAL), scores.shape)
    check_compaction(caches, SPECIAL[picks].cuda(), evictions)


@pytest.mark.parametrize("block_size", [16, 128])
def test_a_first_eviction_of_32k_tokens(block_size: int) -> None:
    blocks = 32768 // block_size
    caches, scores = make_layers(
        torch.bfloat16, 64, block_size, layers=2, blocks=blocks + 1, kv_heads=2, device="cuda"
    )
    order = list(range(1, blocks + 1))
    room = blocks // 5
    for ranks in (scores, (scores * 50).round()):
        check_compaction(caches, ranks, [Compaction(order[-room:], order[:-room])])


def test_tables_lose_their_holes() -> None:
    gen = torch.Generator().manual_seed(0)
    table = torch.randint(1, 1 << 20, (300, 2048), generator=gen, dtype=torch.int32)
    table[torch.rand(table.shape, generator=gen) < 0.6] = 0
    lens = torch.randint(0, 2048 * 16, (300,), generator=gen, dtype=torch.int32)
    flags = torch.randint(0, 4, (300,), generator=gen, dtype=torch.int32)
    flags[::7] |= EVICTING | SCORED
    check_tables(table.cuda(), lens.cuda(), flags.cuda(), 16, extra_rows=4)
