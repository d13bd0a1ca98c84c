# SPDX-License-Identifier: Apache-2.0
"""Chunks of rows whose KV heads share slots: attention, its log-sum-exp and scores equal the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from h2o_vllm.kernels import reference
from h2o_vllm.kernels.triton import PromptSegments, add_prompt_scores
from h2o_vllm.kernels.triton.lanes import LaneTables
from h2o_vllm.kernels.triton.shared_prompt import attend_shared_prompts
from tests.kernels.cpu.cases import assert_no_worse
from tests.kernels.triton.cases import (
    DTYPES,
    Batch,
    bits,
    exact_prompt,
    low,
    make_batch,
    plain_torch,
)
from tests.kernels.triton.lane_cases import heads_apart, lanes_for

LENGTHS, QUERIES, HEAVY = (
    [9 * 16 + 5, 0, 5 * 16 + 2, 70, 13 * 16],
    [20, 0, 3, 1, 33],
    [6, 0, 2, 0, 9],
)


def segments_of(batch: Batch, rows: list[int], heavy: list[int], **options: bool) -> PromptSegments:
    """As the metadata builder makes them: for as many keys as one head may have."""
    block_size, heads = batch.key_cache.shape[1:3]
    starts, lengths = batch.query_start_loc.tolist(), batch.lengths
    most = [lengths[row][0] + max(heavy[row] - 1, 0) * (heads - 1) * block_size for row in rows]
    return PromptSegments.cut(
        rows, [starts[row] for row in rows], [starts[row + 1] for row in rows],
        [lengths[row][0] + 300 for row in rows], most, heads, "cpu", **options,
    )  # fmt: skip


def expected(batch: Batch, lanes: LaneTables, layer: int, rows: list[int]) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and scores by the reference; output by torch in the cache's dtype; scores, too."""
    exact_out, out, plain_scores = batch.out().double(), batch.out(), batch.scores.clone()
    lse = torch.full((batch.query.shape[1], len(batch.query)), float("nan"))
    scores = batch.scores.clone()
    for queries, alone in heads_apart(batch, lanes, layer, scores):
        lse[queries], new = exact_prompt(alone)
        out[:, queries], plain_new = plain_torch(dataclasses.replace(alone))
        for row in rows:
            start, end = batch.query_start_loc[row : row + 2].tolist()
            where = reference.live_slots(
                alone.block_table[row], int(alone.seq_lens[row]), alone.key_cache.shape[1]
            )
            _, mine, _ = reference.attend(
                alone.query[start:end], alone.key_cache, alone.value_cache, where,
                alone.logit_scale, alone.softcap, alone.sinks,
            )  # fmt: skip
            exact_out[start:end, queries] = mine * batch.scales[2]
        alone.scores.copy_(new)
        plain_scores.view(-1, 1, batch.key_cache.shape[1]).copy_(plain_new)
    return exact_out, lse, scores, out, plain_scores


def check(batch: Batch, lanes: LaneTables, heavy: list[int]) -> None:
    rows = [row for row, (length, count) in enumerate(batch.lengths) if length and count > 1]
    queries = max(batch.lengths[row][1] for row in rows)
    asked = torch.zeros(len(batch.query), dtype=torch.bool)
    for row in rows:
        start, end = batch.query_start_loc[row : row + 2].tolist()
        asked[start:end] = True
    for layer in range(len(lanes.pages)):
        out, scores = batch.out(), batch.scores.clone()
        lse = torch.full((batch.query.shape[1], len(batch.query)), float("nan"))
        given = (batch.block_table, batch.query_start_loc, batch.seq_lens)
        attend_shared_prompts(
            batch.query, batch.key_cache, batch.value_cache, *given, batch.scale, out, lse, queries,
            torch.tensor(rows, dtype=torch.int32), lanes, layer, *batch.device_scales, batch.softcap,
            batch.sinks,
        )  # fmt: skip
        want, want_lse, want_scores, plain, plain_scores = expected(batch, lanes, layer, rows)
        assert out[~asked].isnan().all() and lse[:, ~asked].isnan().all()
        is_low = out.dtype != torch.float32
        assert_no_worse(out[asked], want[asked], plain[asked], 2e-3 if is_low else 4e-6)
        torch.testing.assert_close(lse[:, asked], want_lse[:, asked], rtol=1e-5, atol=1e-5)
        for maxima in (False, True):
            mine = [row for row in rows if (row in batch.maxima) == maxima]
            if mine:
                prompts = segments_of(batch, mine, heavy, maxima=maxima)
                if prompts.partial is not None:
                    prompts.partial.fill_(float("nan"))
                add_prompt_scores(
                    batch.query, batch.key_cache, scores, *given, lse, batch.scale, prompts,
                    *batch.device_scales[:2], batch.softcap, lanes, layer,
                )  # fmt: skip
        scored = bits(want_scores) != bits(batch.scores)
        assert torch.equal(bits(scores[~scored]), bits(batch.scores[~scored]))
        assert_no_worse(
            scores[scored], want_scores[scored], plain_scores[scored], 1e-3 if is_low else 2e-5
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "group", "size", "block_size", "layout"),
    [(2, 3, 16, 16, "NHD"), (3, 1, 24, 4, "HND")],
)
def test_chunks_equal_the_reference(
    kv_heads: int, group: int, size: int, block_size: int, layout: str, dtype: str
) -> None:
    lengths = [
        max(one // (16 // block_size), count) for one, count in zip(LENGTHS, QUERIES, strict=True)
    ]
    batch = make_batch(
        lengths, QUERIES, kv_heads=kv_heads, group=group, size=size, block_size=block_size,
        dtype=DTYPES[dtype], layout=layout, strided=True,
    )  # fmt: skip
    heavy = [6, 0, 2, 0, 4 if block_size == 4 else 9]
    check(batch, lanes_for(batch, heavy, (1, 0, 0, 0, 0)), heavy)


def test_a_chunk_of_several_segments_equals_the_reference() -> None:
    """One position is a multiple of 256: what the second segment sums is added by a second launch."""
    batch = make_batch([40 * 16], [300], kv_heads=2, group=1, size=16)
    heavy = [12]
    assert segments_of(batch, [0], heavy).partial is not None
    check(batch, lanes_for(batch, heavy, (2,)), heavy)


def test_maxima_soft_caps_and_sinks_are_those_of_each_head() -> None:
    batch = make_batch(LENGTHS, QUERIES, kv_heads=2, group=3, size=16, spread=8.0)
    batch = dataclasses.replace(low(batch, 0, 2), softcap=6.0, sinks=torch.linspace(-3, 5, 6))
    check(batch, lanes_for(batch, HEAVY), HEAVY)


def test_an_8_bit_cache_is_read_by_lanes() -> None:
    batch = make_batch(
        LENGTHS, QUERIES, kv_heads=2, group=2, size=16, dtype=torch.float8_e4m3fn, scales=(0.5, 1.5, 0.75)
    )  # fmt: skip
    check(batch, lanes_for(batch, HEAVY), HEAVY)
