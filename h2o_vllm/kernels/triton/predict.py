# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Predicted attention of fresh tokens: weighted sums of their keys and values, per KV head, by a calibration.

The sums lie in the scratch, after the parts of the (eviction, layer, head): per (eviction, layer), ``room``
numbers for each predicted head. Tensor-parallel ranks add up their sums before :mod:`.rescore` turns them
into attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_vllm.kernels.triton.candidates import place_of
from h2o_vllm.kernels.triton.dot import dot
from h2o_vllm.kernels.triton.launching import launch
from h2o_vllm.kernels.triton.sums import cache_at
from h2o_vllm.policy.ranks import Op

__all__ = ["Prediction", "add_predicted", "prediction_bytes"]

_PREDICTED = tl.constexpr(int(Op.PREDICTED))
_TILE = 64
"""Tokens per program."""
_WIDE = 32
"""Dimensions of a key or value per product."""


def _rows(size: int) -> int:
    return triton.cdiv(size, _WIDE) * _WIDE


def _columns(of_heads: int) -> int:
    # The least that a tensor core multiplies.
    return max(16, triton.next_power_of_2(of_heads))


def prediction_bytes(layers: int, kv_heads: int, of_heads: int, size: int) -> int:
    """Upper bound of a :class:`Prediction`'s device memory, in bytes."""
    return 4 * layers * _columns(of_heads) * (2 * kv_heads * _rows(size) + 1)


class Part(Protocol):
    """The part of :class:`h2o_vllm.calibration.file.Part` that this module reads."""

    @property
    def weights(self) -> Tensor: ...
    @property
    def rotation(self) -> tuple[int, bool]: ...
    @property
    def first(self) -> int: ...
    @property
    def of_all_heads(self) -> bool: ...


@dataclass(frozen=True)
class Prediction:
    """A calibration as the kernel reads it, on the device.

    Attributes:
        weights: [L, KH, 2, rows, columns], float32: per source head a weight for each dimension of its key,
            then of its value (rows), for each predicted head (columns). The second dimension of a rotated
            pair has no weight.
        constants: [L, columns], float32, added to the sums.
        turned: number of a key's first dimensions that are rotated, in pairs. interleaved: pairs are adjacent
            dimensions, else the two halves.
        of_heads: number of predicted heads. first: index of this rank's first head among them.
        add_ranks: sums a tensor over all ranks, in place, on the device's stream; ``None``: not needed.
    """

    weights: Tensor
    constants: Tensor
    turned: int
    interleaved: bool
    of_heads: int
    first: int
    add_ranks: Callable[[Tensor], None] | None = None

    @classmethod
    def of(
        cls,
        part: Part,
        kv_heads: int,
        size: int,
        device: torch.device | str,
        scales: tuple[Tensor, Tensor] | None = None,
        add_ranks: Callable[[Tensor], None] | None = None,
    ) -> Prediction:
        """What a rank with ``kv_heads`` heads of ``size`` needs of a calibration.

        Args:
            scales: scales of 8-bit keys and values, [L] each; ``None``: 1.
            add_ranks: see the attribute; used if a head is predicted from heads of several ranks.
        """
        turned, interleaved = part.rotation
        layers, of_heads, width = part.weights.shape
        own = 2 * size - turned // 2
        known = part.weights[..., :-1].cpu()
        if width - 1 == kv_heads * own:
            by_source = known.unflatten(2, (kv_heads, own)).permute(0, 2, 3, 1)
        else:
            # Each head is predicted from its own key and value alone.
            by_source = known.new_zeros(layers, kv_heads, own, of_heads)
            for head in range(kv_heads):
                by_source[:, head, :, head] = known[:, head]
        one = torch.arange(0, turned, 2) if interleaved else torch.arange(turned // 2)
        of_keys = torch.cat([one, torch.arange(turned, size)])
        weights = torch.zeros(layers, kv_heads, 2, _rows(size), _columns(of_heads))
        weights[:, :, 0, of_keys, :of_heads] = by_source[:, :, : len(of_keys)]
        weights[:, :, 1, :size, :of_heads] = by_source[:, :, len(of_keys) :]
        if scales is not None:
            weights *= torch.stack([one.float().cpu() for one in scales], 1)[:, None, :, None, None]
        constants = torch.zeros(layers, _columns(of_heads))
        constants[:, :of_heads] = part.weights[..., -1]
        assert not part.of_all_heads or add_ranks is not None
        return cls(
            weights.to(device), constants.to(device), turned, interleaved, of_heads, part.first,
            add_ranks if part.of_all_heads else None,
        )  # fmt: skip


def add_predicted(
    units: int,
    room: int,
    given: tuple[Any, ...],
    caches: tuple[Any, ...],
    prediction: Prediction,
    behind: int,
    **sizes: int,
) -> None:
    """Write the sums of some (eviction, layer) into the scratch, and sum them over all ranks.

    Args:
        units: number of (eviction, layer). room: numbers per head. given: the first arguments of all
            rescoring kernels.
        caches: addresses and strides of keys and values. behind: offset of the first sum in the scratch.
        sizes: KH, BS, D and DP of the kernel.
    """
    _, table, scratch, first_unit, num_layers, _, stride_table, _ = given
    told = (
        table, scratch, first_unit, num_layers, stride_table, room, behind, *caches, prediction.weights,
        prediction.constants,
    )  # fmt: skip
    constants = {
        "TURNED": prediction.turned, "INTERLEAVED": prediction.interleaved, "OF": prediction.of_heads,
        "COLUMNS": prediction.constants.shape[1], "ROWS": prediction.weights.shape[3], "TILE": _TILE,
        "WIDE": _WIDE, "num_warps": 4, **sizes,
    }  # fmt: skip
    form = (caches[1].dtype, caches[2:], *constants.values())
    launch(_weigh, (units, -(-room // _TILE)), form, told, constants)
    if prediction.add_ranks is not None:
        everything = scratch.view(-1)
        prediction.add_ranks(everything[behind : behind + units * prediction.of_heads * room])


@triton.jit(do_not_specialize=["first_unit", "num_layers", "stride_table", "room", "behind"])
def _weigh(
    table,
    scratch,
    first_unit,
    num_layers,
    stride_table,
    room,
    behind,
    pointers,
    any_cache,
    stride_kn,
    stride_ks,
    stride_kh,
    stride_vn,
    stride_vs,
    stride_vh,
    weights,
    constants,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OF: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    KH: tl.constexpr,
    BS: tl.constexpr,
    D: tl.constexpr,
):
    """The sums of a tile of one (eviction, layer)'s fresh tokens."""
    unit = first_unit + tl.program_id(0)
    layer = (unit % num_layers).to(tl.int64)
    entry = table + (unit // num_layers).to(tl.int64) * stride_table
    known = tl.load(entry) * BS
    count = tl.load(entry + 1) * BS - known
    first = tl.program_id(1) * TILE
    if ((tl.load(entry + 2) & _PREDICTED) == 0) | (first >= count):
        return
    mine = first + tl.arange(0, TILE)
    live = mine < count
    block, slot = place_of(entry, known + mine, live, BS)
    heads = tl.arange(0, COLUMNS)
    sums = tl.zeros([TILE, COLUMNS], tl.float32)
    sums += tl.load(constants + layer * COLUMNS + heads)[None, :]
    keys = cache_at(pointers + layer, any_cache) + block * stride_kn + slot * stride_ks
    values = (
        cache_at(pointers + num_layers + layer, any_cache) + block * stride_vn + slot * stride_vs
    )
    weight = weights + layer * (KH * 2 * ROWS * COLUMNS) + heads[None, :]
    for head in range(KH):
        for at in range(0, D, WIDE):
            wide = at + tl.arange(0, WIDE)
            there = live[:, None] & (wide < D)[None, :]
            key = tl.load(keys[:, None] + wide[None, :], mask=there, other=0.0).to(tl.float32)
            if TURNED > 0:
                if INTERLEAVED:
                    paired = (wide < TURNED) & (wide % 2 == 0)
                    other = wide + 1
                else:
                    paired = wide < TURNED // 2
                    other = wide + TURNED // 2
                second = tl.load(
                    keys[:, None] + other[None, :], mask=live[:, None] & paired[None, :], other=0.0
                ).to(tl.float32)
                key = tl.where(paired[None, :], tl.sqrt(key * key + second * second), key)
            rows = (head * 2 * ROWS + wide)[:, None] * COLUMNS
            sums = dot(key, tl.load(weight + rows), sums)
            value = tl.load(values[:, None] + wide[None, :], mask=there, other=0.0).to(tl.float32)
            sums = dot(value, tl.load(weight + rows + ROWS * COLUMNS), sums)
        keys += stride_kh
        values += stride_vh
    at = behind + (tl.program_id(0) * OF + heads).to(tl.int64) * room
    tl.store(
        scratch + at[None, :] + mine[:, None], sums, mask=live[:, None] & (heads < OF)[None, :]
    )
