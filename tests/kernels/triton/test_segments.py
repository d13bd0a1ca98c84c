# SPDX-License-Identifier: Apache-2.0
"""Prompts are cut by position alone, and never into more than the scratch holds."""

from itertools import pairwise

import pytest

from h2o_vllm.kernels.triton.segments import FIELDS, PromptSegments, cuts


@pytest.mark.parametrize("end", [1, 256, 257, 4096, 5000, 40000, 1 << 20])
def test_segments_cover_each_query_once_and_grow_with_the_context(end: int) -> None:
    found = cuts(0, end)
    assert found[0] == 0 and found[-1] == end and found == sorted(set(found))
    for first, after in pairwise(found):
        assert after - first <= max(256, first // 16)
        assert after == end or after - first >= max(256, first / 32)


def test_a_part_of_a_sequence_is_cut_where_the_whole_is() -> None:
    whole = set(cuts(0, 50000))
    for first, end in ((0, 1), (100, 300), (4095, 4097), (8000, 9000), (12345, 50000)):
        assert cuts(first, end) == [first, *sorted(at for at in whole if first < at < end), end]


def one(first: int, end: int, kv_heads: int = 2, **options: int) -> PromptSegments:
    """Of a row whose queries are ``first`` .. ``end - 1``."""
    last = 7 + end - first
    return PromptSegments.cut([3], [7], [last], [end], [end], kv_heads, "cpu", **options)


def test_a_row_that_lost_tokens_needs_room_for_the_others() -> None:
    prompts = PromptSegments.cut([0], [0], [100], [1000], [300], 2, "cpu")
    assert [word[1:5] for word in prompts.segments.tolist()] == [[0, 100, -1, 384]]
    prompts = PromptSegments.cut([0], [0], [100], [1100], [300], 2, "cpu")
    assert [word[1:5] for word in prompts.segments.tolist()] == [
        [0, 24, -1, 384],
        [24, 100, 0, 384],
    ]
    assert prompts.max_keys == 300 and prompts.launches == ((0, 2, 384),)


def test_a_row_is_described() -> None:
    prompts = one(500, 800)
    assert prompts.segments.shape == (3, FIELDS) and prompts.max_keys == 800
    room = 896  # whole tiles
    assert prompts.segments[:, :6].tolist() == [
        [3, 7, 19, -1, room, 2], [3, 19, 275, 0, room, 0], [3, 275, 307, 2 * room, room, 0],
    ]  # fmt: skip
    assert prompts.launches == ((0, 3, 2 * room),)
    assert prompts.partial is not None and prompts.partial.shape == (2 * 2 * room,)


def test_a_whole_row_needs_no_scratch() -> None:
    prompts = one(0, 256)
    assert prompts.launches == ((0, 1, 0),) and prompts.partial is None


@pytest.mark.parametrize("scratch", [0, 8 * 1024, 8 * 3000, 8 * 7000])
def test_partial_sums_never_exceed_the_scratch(scratch: int) -> None:
    rows = [(0, 600), (0, 1024), (900, 1024), (100, 3000), (200, 210)]
    starts = [0, 600, 1624, 1748, 4648]
    prompts = PromptSegments.cut(
        list(range(5)), starts, [at + b - a for at, (a, b) in zip(starts, rows, strict=True)],
        [b for _, b in rows], [b for _, b in rows], 2, "cpu", scratch_bytes=scratch,
    )  # fmt: skip
    held = 0 if prompts.partial is None else prompts.partial.nbytes
    assert held <= scratch
    assert prompts.launches[0][0] == 0 and prompts.launches[-1][1] == len(prompts.segments)
    words = prompts.segments.tolist()
    for row in range(5):
        mine = [word for word in words if word[0] == row]
        assert mine[0][3] == -1 and mine[0][5] == len(mine) - 1
        assert sum(end - start for _, start, end, *_ in mine) == rows[row][1] - rows[row][0]
        # Alone, it is cut in the same places.
        again = one(*rows[row], scratch_bytes=scratch).segments.tolist()
        assert [b - a for _, a, b, *_ in again] == [b - a for _, a, b, *_ in mine]
    for begin, end, sums in prompts.launches:
        taken = sorted((at, at + 2 * room) for _, _, _, at, room, *_ in words[begin:end] if at >= 0)
        assert all(a[1] <= b[0] for a, b in pairwise(taken))
        assert not taken or taken[-1][1] <= held // 4
        assert sums * 2 == sum(b - a for a, b in taken)
