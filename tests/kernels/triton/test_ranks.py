# SPDX-License-Identifier: Apache-2.0
"""Ranks by sorting: places among all tokens, whatever the size of the tiles that are sorted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton.rescore_laws import check_places, numbers_to_rank, places_by_kernels


@pytest.mark.parametrize(
    ("room", "tile"),
    # The last tile full, of one block, and alone; tiles of few tokens, as GPUs have them, and between.
    [(64, 16), (80, 16), (208, 64), (64, 64), (48, 64), (528, 256), (1040, 1024)],
)
def test_tiles_of_any_size(room: int, tile: int) -> None:
    check_places(room, tile=tile)


@pytest.mark.parametrize(("room", "tile"), [(208, 64), (528, 256)])
def test_the_emulation_is_what_the_kernels_do(room: int, tile: int) -> None:
    found = numbers_to_rank(room)
    places, _ = places_by_kernels(found, tile)
    for mine, by_kernels in zip(found, places, strict=True):
        assert torch.equal(emulated_places(mine, tile), by_kernels.long())


@pytest.mark.parametrize("tile", [64, 1024])
def test_places_of_100_000_tokens_are_those_of_a_stable_sort(tile: int) -> None:
    """By the emulation: the interpreter would take an hour."""
    # Tiles of 64: as many tiles, of fewer tokens.
    room = 100_000 if tile == 1024 else 6_256
    for mine in numbers_to_rank(room):
        order = mine.argsort(descending=True, stable=True)
        assert torch.equal(emulated_places(mine, tile)[order], torch.arange(room))


def emulated_places(found: Tensor, tile: int) -> Tensor:
    """[n], int64: what ``_sort_tiles`` and ``_find_places`` do, tile by tile, in torch on a CPU."""
    count = len(found)
    bits = torch.where(found == 0, 0.0, found).view(torch.int32)
    high = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    padded = -(-count // tile) * tile
    # Beyond the last token: behind all of them.
    keys = torch.full((padded,), 2**63 - 1)
    keys[:count] = (high.long() << 32) | (torch.arange(count) % tile)
    keys = keys.view(-1, tile).sort(1).values.flatten()[:count]
    token = torch.arange(count) // tile * tile + (keys & 0x7FFFFFFF)
    in_order, first = found[token], torch.arange(count) // tile * tile
    places = torch.arange(count) % tile
    for other in range(0, count, tile):
        theirs = in_order[other : other + tile]
        before = _before(theirs, in_order, other < first, tile)
        places += torch.where(first == other, 0, before)
    return torch.empty_like(places).scatter_(0, token, places)


def _before(theirs: Tensor, found: Tensor, or_equal: Tensor, tile: int) -> Tensor:
    """As ``ranks._before``."""
    place = torch.zeros(len(found), dtype=torch.int64)
    step = tile
    while step:
        probe = place + step - 1
        there = probe < len(theirs)
        other = theirs[probe.clamp_max(len(theirs) - 1)]
        higher = (other > found) | (or_equal & (other == found))
        place += torch.where(there & higher, step, 0)
        step //= 2
    return place
