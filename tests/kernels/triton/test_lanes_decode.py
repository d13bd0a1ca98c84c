# SPDX-License-Identifier: Apache-2.0
"""Decode attention of rows whose KV heads share slots equals the reference, head by head, in every layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from h2o_vllm.kernels.triton import DecodeWorkspace, attend_decode
from h2o_vllm.kernels.triton.lanes import LaneTables
from loadtest.kernels.lanes import expected as benchmark_expects
from loadtest.kernels.lanes import half_shared
from tests.kernels.cpu.cases import assert_no_worse
from tests.kernels.triton.cases import DTYPES, Batch, bits, exact, low, make_batch, plain_torch
from tests.kernels.triton.lane_cases import heads_apart, lanes_for

LENGTHS, HEAVY = [3 * 16 + 1, 9 * 16 + 5, 0, 40, 20 * 16], [1, 6, 0, 0, 13]


def workspace_for(
    batch: Batch, layers: int, spare: int = 4, tokens: int | None = None
) -> DecodeWorkspace:
    blocks, block_size, kv_heads, size = batch.key_cache.shape
    workspace = DecodeWorkspace(
        len(batch.seq_lens) + 1, blocks * block_size if tokens is None else tokens, batch.query.shape[1],
        kv_heads, batch.out().dtype, size, batch.query.device, spare, sharing_layers=layers,
    )  # fmt: skip
    for scratch in (
        workspace.part_out,
        workspace.part_max,
        workspace.part_sum,
        workspace.probs,
        workspace.tile_max,
    ):
        scratch.fill_(float("nan"))
    return workspace


def decode(
    batch: Batch, lanes: LaneTables, workspace: DecodeWorkspace, layer: int, out: Tensor, scores: Tensor
) -> None:  # fmt: skip
    workspace.plan(
        batch.query_start_loc, batch.seq_lens, batch.flags, lanes, batch.key_cache.shape[1]
    )
    attend_decode(
        batch.query, batch.key_cache, batch.value_cache, scores, batch.block_table, batch.scale,
        out, workspace, *batch.device_scales, batch.softcap, batch.sinks, lanes, layer,
    )  # fmt: skip


def expected(
    batch: Batch, lanes: LaneTables, layer: int, *, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and scores by the reference, or by torch in the cache's dtype."""
    out, scores = batch.out(), batch.scores.clone()
    for queries, alone in heads_apart(batch, lanes, layer, scores):
        out[:, queries], new = (plain_torch if plain else exact)(alone)
        alone.scores.copy_(new)
    return out, scores


def check(batch: Batch, lanes: LaneTables, workspace: DecodeWorkspace | None = None) -> None:
    """In every layer; all that nobody attends stays as it was."""
    workspace = workspace or workspace_for(batch, len(lanes.pages))
    for layer in range(len(lanes.pages)):
        out, scores = batch.out(), batch.scores.clone()
        decode(batch, lanes, workspace, layer, out, scores)
        want, want_scores = expected(batch, lanes, layer)
        plain, plain_scores = expected(batch, lanes, layer, plain=True)
        attended = ~want[:, 0, 0].isnan()
        assert out[~attended].isnan().all()
        is_low = out.dtype != torch.float32
        assert_no_worse(out[attended], want[attended], plain[attended], 1e-3 if is_low else 4e-6)
        scored = bits(want_scores) != bits(batch.scores)
        assert torch.equal(bits(scores[~scored]), bits(batch.scores[~scored]))
        assert_no_worse(
            scores[scored], want_scores[scored], plain_scores[scored], 5e-4 if is_low else 2e-6
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "group", "size", "block_size", "layout"),
    [(2, 1, 16, 16, "NHD"), (3, 3, 16, 16, "HND"), (4, 2, 24, 4, "NHD")],
)
def test_decode_equals_the_reference(
    kv_heads: int, group: int, size: int, block_size: int, layout: str, dtype: str
) -> None:
    batch = make_batch(
        [one // (16 // block_size) for one in LENGTHS], kv_heads=kv_heads, group=group, size=size,
        block_size=block_size, dtype=DTYPES[dtype], layout=layout, strided=True,
    )  # fmt: skip
    check(batch, lanes_for(batch, HEAVY, (1, 0, 0, 0, 3)))


@pytest.mark.parametrize("spare", [1, 3, 40])
def test_any_cut_gives_the_same(spare: int) -> None:
    batch = make_batch([45 * 16 + 3, 0, 3, 12 * 16], kv_heads=3, group=2, size=16)
    lanes = lanes_for(batch, [40, 0, 0, 9], (2, 0, 0, 1))
    check(batch, lanes, workspace_for(batch, 2, spare))


def test_maxima_soft_caps_and_sinks_are_those_of_each_head() -> None:
    batch = make_batch(LENGTHS, kv_heads=2, group=3, size=16, spread=8.0)
    batch = dataclasses.replace(low(batch, 1, 3), softcap=6.0, sinks=torch.linspace(-3, 5, 6))
    check(batch, lanes_for(batch, HEAVY))


def test_an_8_bit_cache_is_read_by_lanes() -> None:
    batch = make_batch(
        LENGTHS, kv_heads=2, group=2, size=16, dtype=torch.float8_e4m3fn, scales=(0.5, 1.5, 0.75)
    )
    check(batch, lanes_for(batch, HEAVY))


def test_the_benchmarks_rows_equal_what_it_expects() -> None:
    """Of which it makes sure on a GPU before it times anything."""
    batch = make_batch([16 * 16 + 5] * 3, kv_heads=4, group=2, size=16)
    table = batch.block_table[:, :17].contiguous()
    lanes = half_shared(table, 2, len(batch.key_cache), 4)
    assert (lanes.offsets[0].diff() == torch.tensor([3, 6, 10, 13])).all()
    out, scores = batch.out(), torch.where(batch.poisoned, batch.scores, 0.0)
    decode(batch, lanes, workspace_for(batch, 2), 0, out, scores)
    given = (batch.query, batch.key_cache, batch.value_cache, table, batch.seq_lens, batch.scale)
    want, want_scores = benchmark_expects(*given, lanes)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    live = ~batch.poisoned
    torch.testing.assert_close(scores[live], want_scores[live], rtol=1e-5, atol=1e-6)


def test_rows_that_share_nothing_are_attended_as_without_lanes() -> None:
    batch = make_batch([700, 0, 65, 130], kv_heads=2, group=2, size=16)
    lanes = lanes_for(batch, [0] * 4)
    assert lanes.rows.tolist() == [[-1, 0, 0]] * 4
    check(batch, lanes)
    own = lanes_for(batch, [20, 0, 3, 8], own=True)
    results = []
    for tables in (lanes, own):
        out, scores = batch.out(), batch.scores.clone()
        decode(batch, tables, workspace_for(batch, 2), 1, out, scores)
        results.append((out, scores))
    for nobody, everybody in zip(*results, strict=True):
        assert torch.equal(bits(nobody), bits(everybody))


def test_a_plan_forgets_the_one_before_and_leaves_prompts_alone() -> None:
    long = make_batch([700, 300, 65, 90], kv_heads=2, group=2, size=16)
    short = make_batch([12, 0, 33, 70], [1, 0, 5, 1], kv_heads=2, group=2, size=16)
    workspace = workspace_for(long, 2)
    check(long, lanes_for(long, [30, 0, 4, 2]), workspace)
    check(short, lanes_for(short, [0, 0, 1, 2]), workspace)


@pytest.mark.parametrize("pinned", [64, 7 * 16])
def test_pinned_tokens_and_unscored_rows_take_no_scratch(pinned: int) -> None:
    """Whole tiles of them are attended and not scored, in front of the lanes."""
    lengths = [pinned + 200, pinned + 70, 150]
    batch = make_batch(lengths, kv_heads=2, group=2, size=16)
    blocks = pinned // 16
    lanes = lanes_for(batch, [9, 2, 5], (blocks, blocks, 0))
    batch.pinned = (pinned, pinned, 1 << 27)
    held = sum(-(-(length - pinned) // 16) * 16 for length in lengths[:2])
    workspace = workspace_for(batch, 2, tokens=held)
    unscored = torch.zeros_like(batch.poisoned)
    for row in (0, 1):
        unscored[batch.block_table[row, : pinned // 64 * 4].long()] = True
    unscored[batch.block_table[2, :10].long()] = True
    for layer in range(2):
        out, scores = batch.out(), batch.scores.clone()
        decode(batch, lanes, workspace, layer, out, scores)
        want, want_scores = expected(batch, lanes, layer)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        assert torch.equal(bits(scores[unscored]), bits(batch.scores[unscored]))
        live = ~unscored & ~batch.poisoned
        torch.testing.assert_close(scores[live], want_scores[live], rtol=1e-5, atol=1e-6)


def test_pieces_of_heads_are_of_like_length() -> None:
    """One head has nearly all lanes: its keys are cut in more pieces, not in longer ones."""
    batch = make_batch([90 * 16], kv_heads=3, group=1, size=16)
    lanes = lanes_for(batch, [85])
    workspace = workspace_for(batch, 2, spare=4)
    workspace.plan(batch.query_start_loc, batch.seq_lens, None, lanes, 16)
    assert workspace.head_pieces is not None
    for layer, pieces in enumerate(workspace.head_pieces.tolist()):
        used = [piece for piece in pieces if piece[0] >= 0]
        assert pieces[: len(used)] == used
        assert all(piece[3] - piece[2] <= max(128, 90 * 16 * 3 // 12 + 64) for piece in used)
        for head in range(3):
            mine = [piece for piece in used if piece[9] == head]
            count = int((lanes.owners[layer] == head).sum())
            cuts = [0, *(piece[3] for piece in mine)]
            assert [piece[2] for piece in mine] == cuts[:-1]
            assert cuts[-1] == (count + 5) * 16
