# SPDX-License-Identifier: Apache-2.0
"""Decode attention with scores equals the reference; the plan cuts the rows as it promises."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from h2o_vllm.kernels.triton.workspace import DecodeWorkspace
from tests.kernels.triton.cases import DTYPES, bits, exact, lend, make_batch, row_slots, shapes
from tests.kernels.triton.decode_laws import check_decode, decode, workspace_for

ALL = shapes(  # all groups and sizes that are promised
    (1, 2, 64, 16, "NHD"), (3, 2, 64, 32, "HND"), (4, 2, 128, 16, "NHD"), (7, 2, 80, 16, "NHD"),
    (8, 2, 96, 48, "HND"), (4, 2, 256, 528, "NHD"), (32, 2, 64, 128, "NHD"), (1, 2, 128, 128, "HND"),
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@ALL
def test_decode_equals_the_reference(shape: Any, dtype: str) -> None:
    lengths = [1, 15, 0, 16, 17, 263, 0]
    check_decode(make_batch(lengths, dtype=DTYPES[dtype], strided=True, **shape))


@pytest.mark.parametrize("query_dtype", [None, torch.bfloat16], ids=["q8", "q16"])
def test_decode_of_an_8_bit_cache_equals_the_reference(query_dtype: torch.dtype | None) -> None:
    check_decode(
        make_batch(
            [1, 0, 33, 200], group=4, size=80, dtype=torch.float8_e4m3fn,
            query_dtype=query_dtype, scales=(0.5, 1.5, 0.75) if query_dtype is None else (1.0, 1.5, 0.75),
        )
    )  # fmt: skip


@pytest.mark.parametrize("spread", [0.0, 30.0])
def test_decode_survives_flat_and_peaked_softmax(spread: float) -> None:
    check_decode(make_batch([200, 65], dtype=torch.bfloat16, spread=spread))


def test_padding_of_a_graph_is_left_alone() -> None:
    """A graph's grid and workspace are those of its largest batch."""
    batch = make_batch([40, 300, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0])
    check_decode(batch, workspace_for(batch, rows=9))


def test_a_plan_forgets_the_one_before() -> None:
    long, short = make_batch([700, 300, 65, 9]), make_batch([12, 0, 3, 0])
    workspace = workspace_for(long)
    check_decode(long, workspace)
    check_decode(short, workspace)


def test_rows_that_do_not_fit_the_scratch_are_attended_without_scores() -> None:
    batch = make_batch([64, 400, 30])
    out, scores = batch.out(), batch.scores.clone()
    workspace = workspace_for(batch, tokens=0)  # two tiles per row
    decode(batch, out, scores, workspace)
    want, want_scores = batch.out(), batch.scores.clone()
    decode(batch, want, want_scores)
    assert torch.equal(out, want)
    first = row_slots(batch, 0)
    assert torch.equal(scores[first], want_scores[first])
    for row in (1, 2):
        dropped = row_slots(batch, row)
        assert torch.equal(scores[dropped], batch.scores[dropped])


@pytest.mark.parametrize("pinned", [16, 64, 200, 320])
@pytest.mark.parametrize("spare", [1, 40])
def test_pinned_tokens_take_no_scratch(spare: int, pinned: int) -> None:
    """Any number of rows may begin in the same blocks: what lies behind them fits, and is scored."""
    lengths = [pinned + more for more in (1, 40, 130, 70, 64, 300, 16, 17)]
    batch = make_batch(lengths, dtype=torch.bfloat16)
    for row in range(1, len(lengths)):
        batch = lend(batch, 0, row, pinned // 16)
    batch.pinned = (pinned,) * len(lengths)
    held = len({*batch.block_table[:, : pinned // 16].flatten().tolist()}) * 16
    held += sum(-(-(length - pinned) // 16) * 16 for length in lengths)
    out, scores = batch.out(), batch.scores.clone()
    decode(batch, out, scores, workspace_for(batch, spare, tokens=held))
    want, want_scores = exact(batch)
    torch.testing.assert_close(out.double(), want.double(), rtol=0.02, atol=0.01)
    private = ~row_slots(batch, 0)
    for row in range(len(lengths)):
        slots = torch.arange(pinned, lengths[row])
        private[batch.block_table[row, slots // 16].long(), :, slots % 16] = True
    private &= ~batch.poisoned
    torch.testing.assert_close(scores[private], want_scores[private], rtol=1e-3, atol=1e-4)
    changed = bits(scores) != bits(batch.scores)
    whole_tiles = pinned // 64 * 64
    if whole_tiles:
        slots = torch.arange(whole_tiles)
        assert not changed[batch.block_table[0, slots // 16].long(), :, slots % 16].any()


@pytest.mark.parametrize(
    "lengths",
    [[1], [5000], [700, 0, 3, 0, 129, 64], [64] * 40, [1, 9000] * 35, [0, 0], list(range(150))],
)
def test_a_plan_covers_each_key_once_in_pieces_of_like_length(lengths: list[int]) -> None:
    workspace = DecodeWorkspace(len(lengths), sum(lengths), 6, 2, torch.float16, 64, "cpu", spare=8)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    workspace.plan(starts, lens, torch.zeros_like(lens), lens[:, None], 16)
    pieces = [piece[:7] for piece in workspace.pieces.tolist()]
    used = [piece for piece in pieces if piece[0] >= 0]
    assert pieces[: len(used)] == used
    in_cut_rows = [piece[6] > 1 for piece in used]
    assert in_cut_rows == sorted(in_cut_rows, reverse=True)
    assert all(piece[7] == sum(in_cut_rows) for piece in workspace.pieces.tolist()[: len(used)])
    tiles = 0
    target = max(128, -(-sum(lengths) // 8)) + workspace.tile - 1
    limit = 1.5 * target + workspace.tile
    for row, length in enumerate(lengths):
        mine = [piece for piece in used if piece[0] == row]
        cuts = [0, *(piece[3] for piece in mine)]
        assert [piece[2] for piece in mine] == cuts[:-1]
        assert cuts[-1] == length
        assert all(0 < end - start <= limit for start, end in pairwise(cuts))
        assert all(cut % workspace.tile == 0 for cut in cuts[:-1])
        first = used.index(mine[0]) if mine else 0
        assert used[first : first + len(mine)] == mine
        assert all(piece[1:2] + piece[4:] == [row, tiles, first, len(mine)] for piece in mine)
        tiles += -(-length // workspace.tile)
    assert sorted(piece[0] for piece in used) == [
        row for row, length in enumerate(lengths) for _ in range(sum(p[0] == row for p in used))
    ]
    # What the second launch is made for.
    assert sum(in_cut_rows) <= 2 * workspace.spare
