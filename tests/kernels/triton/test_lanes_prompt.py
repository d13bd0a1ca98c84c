# SPDX-License-Identifier: Apache-2.0
"""Chunks of rows whose KV heads share slots: attention, its log-sum-exp and scores equal the reference."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.kernels.triton.cases import DTYPES, make_batch, shapes
from tests.kernels.triton.lane_cases import lanes_for
from tests.kernels.triton.lane_laws import check_lane_chunks, lane_segments

LENGTHS, QUERIES, HEAVY = (
    [9 * 16 + 5, 0, 5 * 16 + 2, 70, 13 * 16],
    [20, 0, 3, 1, 33],
    [6, 0, 2, 0, 9],
)


@pytest.mark.parametrize("dtype", DTYPES)
@shapes((3, 2, 16, 16, "NHD"), (1, 3, 24, 4, "HND"))
def test_chunks_equal_the_reference(shape: Any, dtype: str) -> None:
    smaller = 16 // shape["block_size"]
    lengths = [max(one // smaller, count) for one, count in zip(LENGTHS, QUERIES, strict=True)]
    batch = make_batch(lengths, QUERIES, dtype=DTYPES[dtype], strided=True, **shape)
    heavy = [6, 0, 2, 0, 9 if smaller == 1 else 4]
    check_lane_chunks(batch, lanes_for(batch, heavy, (1, 0, 0, 0, 0)))


def test_a_chunk_of_several_segments_equals_the_reference() -> None:
    """Of positions 480 to 540: what the second segment, from 512 on, sums is added by a second launch."""
    batch = make_batch([15 * 16], [60], kv_heads=2, group=1, size=16)
    lanes = lanes_for(batch, [12], (2,))
    assert lane_segments(batch, lanes, [0]).partial is not None
    check_lane_chunks(batch, lanes)


def test_soft_caps_and_sinks_are_those_of_each_head() -> None:
    batch = make_batch(LENGTHS, QUERIES, kv_heads=2, group=3, size=16, spread=8.0)
    batch = dataclasses.replace(batch, softcap=6.0, sinks=torch.linspace(-3, 5, 6))
    check_lane_chunks(batch, lanes_for(batch, HEAVY))


def test_an_8_bit_cache_is_read_by_lanes() -> None:
    batch = make_batch(
        LENGTHS, QUERIES, kv_heads=2, group=2, size=16, dtype=torch.float8_e4m3fn, scales=(0.5, 1.5, 0.75)
    )  # fmt: skip
    check_lane_chunks(batch, lanes_for(batch, HEAVY))
