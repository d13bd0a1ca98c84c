# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel against its reference where KV heads share slots, at real sizes, on a real GPU."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from h2o_vllm.kernels.triton import Compaction, DecodeWorkspace, LaneTables, attend_decode
from tests.kernels.triton.cases import DTYPES, Batch, bits, make_batch, shapes
from tests.kernels.triton.decode_laws import check_decode, decode, plan
from tests.kernels.triton.evict_laws import (
    SPECIAL,
    check_compaction,
    check_lanes_go_back_and_forth,
    make_layers,
    uneven,
)
from tests.kernels.triton.lane_cases import lanes_for
from tests.kernels.triton.lane_laws import (
    check_lane_chunks,
    check_lane_lists,
    lane_segments,
    lane_workspace,
)

DEVICE = "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none"),
]

SHAPES = shapes(
    (4, 8, 128, 16, "NHD"), (4, 8, 128, 16, "HND"), (7, 4, 80, 16, "NHD"), (3, 3, 64, 32, "HND"),
    (8, 2, 256, 64, "NHD"),
)  # fmt: skip
LLAMA: dict[str, Any] = {"group": 4, "kv_heads": 8, "size": 128, "device": DEVICE}

LENGTHS = [8005, 17, 0, 300, 4096, 2049, 1000]
PINNED, SHARED = [0, 0, 0, 64, 640, 128, 0], [6400, 0, 0, 128, 3072, 1024, 0]
"""Tokens of each row: in all, in blocks of each head's own before those that heads share, in these."""
CHUNKS = [600, 1, 0, 100, 333, 256, 100]
"""Of as many, the last ones are queries."""


def sharing(batch: Batch) -> LaneTables:
    block_size = batch.key_cache.shape[1]
    shared, pinned = ([tokens // block_size for tokens in each] for each in (SHARED, PINNED))
    return lanes_for(batch, shared, pinned)


def check(batch: Batch, lanes: LaneTables, tokens: int | None = None) -> None:
    check_decode(batch, lane_workspace(batch, spare=None, tokens=tokens), lanes)


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_decode_equals_the_reference(shape: Any, dtype: str) -> None:
    batch = make_batch(LENGTHS, dtype=DTYPES[dtype], strided=True, device=DEVICE, **shape)
    check(batch, sharing(batch))


def many(rows: int) -> tuple[Batch, LaneTables]:
    """Every third row's heads share nothing, the others all but the newest blocks and a few pinned ones."""
    lengths = torch.randint(0, 1500, (rows,), generator=torch.Generator().manual_seed(rows))
    batch = make_batch([4000, *lengths.tolist()], dtype=torch.bfloat16, **LLAMA)
    pinned = [row % 4 for row in range(rows + 1)]
    shared = [max(0, length // 16 - row % 4 - 4) for row, (length, _) in enumerate(batch.lengths)]
    shared[2::3] = [0] * len(shared[2::3])
    return batch, lanes_for(batch, shared, pinned, layers=1)


def test_a_plan_lists_the_keys_of_heads_that_share() -> None:
    batch, lanes = many(100)
    check_lane_lists(batch, lanes, lane_workspace(batch, 1, spare=None))
    batch = make_batch(LENGTHS, dtype=torch.bfloat16, **LLAMA)
    check_lane_lists(batch, sharing(batch), lane_workspace(batch, spare=None))


def test_pinned_tokens_are_not_scored() -> None:
    batch = make_batch(LENGTHS, dtype=torch.bfloat16, **LLAMA)
    batch.pinned = (*PINNED[:-1], 1 << 27)
    check(batch, sharing(batch), tokens=sum(LENGTHS[:-1]) - sum(PINNED))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_soft_caps_and_sinks_are_those_of_each_head(dtype: torch.dtype) -> None:
    sinks = torch.linspace(-3, 5, 32, device=DEVICE)
    decodes = make_batch(LENGTHS, dtype=dtype, spread=4.0, **LLAMA)
    decodes = dataclasses.replace(decodes, softcap=6.0, sinks=sinks)
    check(decodes, sharing(decodes))
    lengths, queries = [4096, 300, 2049], [100, 60, 256]
    chunks = make_batch(lengths, queries, dtype=dtype, spread=4.0, **LLAMA)
    chunks = dataclasses.replace(chunks, softcap=6.0, sinks=sinks)
    check_lane_chunks(chunks, lanes_for(chunks, [200, 8, 64], (40, 4, 0)))


@pytest.mark.parametrize("query_dtype", [None, torch.bfloat16], ids=["q8", "q16"])
def test_an_8_bit_cache_is_read_by_lanes(query_dtype: torch.dtype | None) -> None:
    scales = (0.5, 1.5, 0.75) if query_dtype is None else (1.0, 1.5, 0.75)
    for queries in (None, CHUNKS):
        batch = make_batch(
            LENGTHS, queries, dtype=torch.float8_e4m3fn, query_dtype=query_dtype, scales=scales, **LLAMA
        )  # fmt: skip
        if queries is None:
            check(batch, sharing(batch))
        else:
            check_lane_chunks(batch, sharing(batch))


def test_decode_is_the_same_each_time() -> None:
    batch = make_batch(LENGTHS, dtype=torch.bfloat16, **LLAMA)
    lanes = sharing(batch)
    first = decoded(batch, lanes, lane_workspace(batch, spare=None))
    for _ in range(20):
        again = decoded(batch, lanes, lane_workspace(batch, spare=None))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))


def decoded(
    batch: Batch, lanes: LaneTables, workspace: DecodeWorkspace, layer: int = 1
) -> tuple[Tensor, Tensor]:
    """Output and scores."""
    out, scores = batch.out(), batch.scores.clone()
    decode(batch, out, scores, workspace, lanes, layer)
    return out, scores


def test_a_graph_serves_whoever_shares() -> None:
    """Captured when nobody's heads share; replayed on what is planned, and listed, outside of it."""
    batch = make_batch(LENGTHS, dtype=torch.bfloat16, **LLAMA)
    batch.pinned = tuple(PINNED)
    some, nobody = sharing(batch), lanes_for(batch, [0] * len(LENGTHS))
    # What the graph knows.
    lanes = LaneTables(**{name: table.clone() for name, table in vars(nobody).items()})
    workspace = lane_workspace(batch, spare=None)
    outs, scores = [batch.out() for _ in range(2)], [batch.scores.clone() for _ in range(2)]

    def step() -> None:
        for layer in range(2):
            attend_decode(batch.given(scores[layer], lanes, layer), outs[layer], workspace)

    padding = dataclasses.replace(batch, seq_lens=torch.zeros_like(batch.seq_lens))
    plan(padding, workspace, lanes)
    step()  # compiles outside of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    for layer in range(2):
        assert outs[layer].isnan().all()
        assert torch.equal(bits(scores[layer]), bits(batch.scores))
    for who, rows in ((some, 7), (nobody, 7), (some, 2)):
        for name, table in vars(lanes).items():
            table.copy_(getattr(who, name))
        planned = dataclasses.replace(
            batch, query_start_loc=batch.query_start_loc[: rows + 1], seq_lens=batch.seq_lens[:rows],
            block_table=batch.block_table[:rows], pinned=batch.pinned[:rows],
        )  # fmt: skip
        plan(planned, workspace, lanes)
        for layer in range(2):
            outs[layer].fill_(float("nan"))
            scores[layer].copy_(batch.scores)
        graph.replay()
        for layer in range(2):
            want, want_scores = decoded(planned, who, lane_workspace(batch, spare=None), layer)
            assert torch.equal(bits(outs[layer]), bits(want))
            assert torch.equal(bits(scores[layer]), bits(want_scores))


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_chunks_equal_the_reference(shape: Any, dtype: str) -> None:
    options = {"dtype": DTYPES[dtype], "strided": True, "device": DEVICE}
    batch = make_batch(LENGTHS, CHUNKS, **options, **shape)
    lanes = sharing(batch)
    assert lane_segments(batch, lanes, [0]).partial is not None
    check_lane_chunks(batch, lanes)


ORDER = (torch.randperm(399, generator=torch.Generator().manual_seed(1)) + 1).tolist()
FIRST = Compaction(ORDER[:60], ORDER[60:260], ORDER[:260], 3)
LATER = Compaction(ORDER[260:320], ORDER[320:330], ORDER[328:330], 1)
"""Of a prompt that was never ranked, and of what an earlier eviction had ranked."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_compaction_equals_the_rule(layout: str, dtype: str) -> None:
    caches, scores = make_layers(
        DTYPES[dtype], 128, 16, layout, layers=3, blocks=400, kv_heads=8, device=DEVICE
    )
    tables = check_compaction(caches, uneven(scores), [FIRST, LATER], seed=0)
    assert (tables.offsets[:, FIRST.slot].diff() != len(FIRST.heavy)).any()
    ties = (uneven(scores) * 50).round()
    # Room for two (eviction, layer) pairs in a launch.
    check_compaction(caches, ties, [FIRST, LATER], 150_000, seed=0)
    gen = torch.Generator().manual_seed(0)
    # Few protected tokens, and more than have room.
    for specials in (SPECIAL, SPECIAL[2:6]):
        picks = torch.randint(0, len(specials), scores.shape, generator=gen)
        check_compaction(caches, specials[picks].to(DEVICE), [FIRST, LATER], seed=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_lanes_go_back_and_forth(dtype: torch.dtype) -> None:
    """A first eviction of 4K tokens, and later ones of what is ranked and a few fresh blocks."""
    caches, scores = make_layers(dtype, 128, 16, layers=3, blocks=400, kv_heads=8, device=DEVICE)
    assert check_lanes_go_back_and_forth(caches, uneven(scores), 60, [200, 10, 1, 1, 40]) > 100
