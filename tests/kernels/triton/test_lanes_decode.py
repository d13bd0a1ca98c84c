# SPDX-License-Identifier: Apache-2.0
"""Decode attention of rows whose KV heads share slots equals the reference, head by head, in every layer."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.kernels.triton.cases import DTYPES, Batch, bits, lend, make_batch, shapes
from tests.kernels.triton.decode_laws import check_decode, decode, plan
from tests.kernels.triton.lane_cases import lanes_for
from tests.kernels.triton.lane_laws import check_lane_lists, lane_workspace

LENGTHS, HEAVY = [3 * 16 + 1, 9 * 16 + 5, 0, 40, 20 * 16], [1, 6, 0, 0, 13]


@pytest.mark.parametrize("dtype", DTYPES)
@shapes((1, 2, 16, 16, "NHD"), (3, 3, 16, 16, "HND"), (2, 4, 24, 4, "NHD"))
def test_decode_equals_the_reference(shape: Any, dtype: str) -> None:
    lengths = [one // (16 // shape["block_size"]) for one in LENGTHS]
    batch = make_batch(lengths, dtype=DTYPES[dtype], strided=True, **shape)
    check_decode(batch, lanes=lanes_for(batch, HEAVY, (1, 0, 0, 0, 3)))


def test_soft_caps_and_sinks_are_those_of_each_head() -> None:
    batch = make_batch(LENGTHS, kv_heads=2, group=3, size=16, spread=8.0)
    batch = dataclasses.replace(batch, softcap=6.0, sinks=torch.linspace(-3, 5, 6))
    check_decode(batch, lanes=lanes_for(batch, HEAVY))


def test_an_8_bit_cache_is_read_by_lanes() -> None:
    batch = make_batch(
        LENGTHS, kv_heads=2, group=2, size=16, dtype=torch.float8_e4m3fn, scales=(0.5, 1.5, 0.75)
    )
    check_decode(batch, lanes=lanes_for(batch, HEAVY))


def test_rows_that_share_nothing_are_attended_as_without_lanes() -> None:
    batch = make_batch([700, 0, 65, 130], kv_heads=2, group=2, size=16)
    lanes = lanes_for(batch, [0] * 4)
    assert lanes.rows.tolist() == [[-1, 0, 0]] * 4
    check_decode(batch, lanes=lanes)
    own = lanes_for(batch, [20, 0, 3, 8], own=True)
    results = []
    for tables in (lanes, own):
        out, scores = batch.out(), batch.scores.clone()
        decode(batch, out, scores, lane_workspace(batch), tables, 1)
        results.append((out, scores))
    for nobody, everybody in zip(*results, strict=True):
        assert torch.equal(bits(nobody), bits(everybody))


def test_a_plan_forgets_the_one_before_and_leaves_prompts_alone() -> None:
    long = make_batch([700, 300, 65, 90], kv_heads=2, group=2, size=16)
    short = make_batch([12, 0, 33, 70], [1, 0, 5, 1], kv_heads=2, group=2, size=16)
    workspace = lane_workspace(long)
    check_decode(long, workspace, lanes_for(long, [30, 0, 4, 2]))
    check_decode(short, workspace, lanes_for(short, [0, 0, 1, 2]))


@pytest.mark.parametrize("pinned", [64, 7 * 16])
def test_pinned_tokens_and_unscored_rows_take_no_scratch(pinned: int) -> None:
    """Whole tiles of them are attended and not scored, in front of the lanes."""
    lengths = [pinned + 200, pinned + 70, 150]
    batch = make_batch(lengths, kv_heads=2, group=2, size=16)
    blocks = pinned // 16
    lanes = lanes_for(batch, [9, 2, 5], (blocks, blocks, 0))
    batch.pinned = (pinned, pinned, 1 << 27)
    held = sum(-(-(length - pinned) // 16) * 16 for length in lengths[:2])
    check_decode(batch, lane_workspace(batch, tokens=held), lanes)


def test_pieces_of_heads_are_of_like_length() -> None:
    """One head has nearly all lanes: its keys are cut in more pieces, not in longer ones."""
    batch = make_batch([90 * 16], kv_heads=3, group=1, size=16)
    lanes = lanes_for(batch, [85])
    workspace = lane_workspace(batch, spare=4)
    plan(batch, workspace, lanes)
    for layer, pieces in enumerate(workspace.head_pieces.tolist()):
        used = [piece for piece in pieces if piece[0] >= 0]
        assert pieces[: len(used)] == used
        assert all(piece[3] - piece[2] <= 1.5 * (90 * 16 * 3 // 12 + 64) for piece in used)
        for head in range(3):
            mine = [piece for piece in used if piece[9] == head]
            count = int((lanes.owners[layer] == head).sum())
            cuts = [0, *(piece[3] for piece in mine)]
            assert [piece[2] for piece in mine] == cuts[:-1]
            assert cuts[-1] == (count + 5) * 16


@pytest.mark.parametrize("spare", [1, 4, 40])
def test_a_plan_lists_the_keys_of_heads_that_share(spare: int) -> None:
    """Beside padding, a row of heads that share nothing, and a chunk."""
    batch = make_batch(
        [*LENGTHS, 45 * 16 + 3, 70], [1, 1, 0, 1, 1, 1, 3], kv_heads=3, group=1, size=16
    )
    lanes = lanes_for(batch, [*HEAVY, 36, 2], (1, 0, 0, 0, 3, 2, 1))
    check_lane_lists(batch, lanes, lane_workspace(batch, spare=spare))


def test_a_plan_lists_the_keys_of_many_rows() -> None:
    """Several programs count the blocks of those before them."""
    lengths = [20 + 7 * row % 90 for row in range(60)]
    batch = make_batch(lengths, kv_heads=5, group=1, size=16, block_size=4)
    heavy = [row % 4 for row in range(60)]
    check_lane_lists(batch, lanes_for(batch, heavy, [row % 3 for row in range(60)]))


def test_pinned_blocks_of_several_rows_are_in_no_list() -> None:
    """Row by row there are more live blocks than the pool has; behind the pinned ones there are not."""
    batch = make_batch([45 * 16, 43 * 16 + 3, 41 * 16], kv_heads=3, group=3, size=16)
    batch = in_a_small_pool(lend(lend(batch, 0, 1, 38), 0, 2, 38))
    live = sum(-(-length // 16) for length, _ in batch.lengths)
    assert live > len(batch.key_cache)
    lanes = lanes_for(batch, [5, 3, 2], (38, 38, 38))
    check_lane_lists(batch, lanes)
    check_decode(batch, lane_workspace(batch, tokens=16 * live), lanes)


def in_a_small_pool(batch: Batch) -> Batch:
    """The same without the blocks that no row has."""
    block_size = batch.key_cache.shape[1]
    live = {0}
    for (length, _), blocks in zip(batch.lengths, batch.block_table.tolist(), strict=True):
        live.update(blocks[: -(-length // block_size)])
    kept = sorted(live)
    places = torch.zeros(len(batch.key_cache), dtype=torch.int32)
    places[kept] = torch.arange(len(kept), dtype=torch.int32)
    return dataclasses.replace(
        batch,
        key_cache=batch.key_cache[kept],
        value_cache=batch.value_cache[kept],
        scores=batch.scores[kept],
        poisoned=batch.poisoned[kept],
        block_table=places[batch.block_table.long()],
    )
