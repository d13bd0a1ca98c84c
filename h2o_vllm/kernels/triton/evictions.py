# SPDX-License-Identifier: Apache-2.0
"""Arguments of compaction on the device: the KV of all layers, and a step's evictions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SCRATCH_BYTES", "Evictions", "KVLayers", "SharedEviction", "SharedEvictions"]

SCRATCH_BYTES = 32 << 20
"""Scratch of compaction and rescoring in bytes, unless long prompts need more."""


class KVLayers:
    """The KV of all evictable layers, so that one launch can reach it. Made once, when the caches exist.

    Keeps the tensors alive. Owns the scratch.
    """

    def __init__(
        self,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """Note the addresses of the layers, and allocate the scratch.

        Args:
            key_caches, value_caches: L views [N, BS, KH, D] of one shape, dtype and strides; last stride 1.
            scratch_bytes: compaction needs 8 bytes per KV head and heavy slot of each (eviction, layer); for
                rescoring see :func:`.rescores.scratch_bytes`.
        """
        self.key_caches = list(key_caches)
        self.value_caches = list(value_caches)
        first = self.key_caches[0]
        # Tokens move as 8-byte words for all dtypes, so NaN keeps its payload.
        self.words = 8 // first.element_size()
        pointers = [
            [cache.data_ptr() for cache in caches]
            for caches in (self.key_caches, self.value_caches)
        ]
        self.pointers = torch.tensor(pointers, dtype=torch.int64, device=first.device)
        self.moves = torch.empty(scratch_bytes // 8, 2, dtype=torch.int32, device=first.device)
        # A list has room for at least one block, and a block has at least 16 slots.
        lists = scratch_bytes // 8 // 16
        self.counts = torch.empty(max(1, lists), dtype=torch.int32, device=first.device)

    @property
    def word_strides(self) -> tuple[int, ...]:
        """The first three strides of a layer's keys, then of its values, in 8-byte words."""
        of_both = (self.key_caches[0].stride()[:3], self.value_caches[0].stride()[:3])
        return tuple(stride // self.words for strides in of_both for stride in strides)

    @property
    def nbytes(self) -> int:
        """Device memory in bytes, without the caches."""
        return self.pointers.nbytes + self.moves.nbytes + self.counts.nbytes


@dataclass(frozen=True)
class Evictions:
    """All evictions of one step, on the device.

    Attributes:
        blocks: [E, W], int32: heavy block ids, then doomed ones, then padding.
        counts: [E, 2], int32: numbers of heavy and doomed blocks.
        max_heavy, max_doomed: host numbers, the largest counts.
    """

    blocks: Tensor
    counts: Tensor
    max_heavy: int
    max_doomed: int

    @classmethod
    def pack(
        cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device | str
    ) -> Evictions:
        """Copy (heavy ids, doomed ids) of each eviction to the device, in one asynchronous copy.

        Evictions with an empty list move nothing and are left out.
        """
        pairs = [(heavy, doomed) for heavy, doomed in pairs if heavy and doomed]
        width = max((len(heavy) + len(doomed) for heavy, doomed in pairs), default=0)
        packed = torch.tensor(
            [
                [
                    len(heavy),
                    len(doomed),
                    0,
                    0,
                    *heavy,
                    *doomed,
                    *[0] * (width - len(heavy) - len(doomed)),
                ]
                for heavy, doomed in pairs
            ],
            dtype=torch.int32,
            pin_memory=torch.device(device).type == "cuda",
        ).view(len(pairs), 4 + width)
        there = packed.to(device, non_blocking=True)
        return cls(
            # Aligned to 16 bytes.
            blocks=there[:, 4:],
            counts=there[:, :2],
            max_heavy=max((len(heavy) for heavy, _ in pairs), default=0),
            max_doomed=max((len(doomed) for _, doomed in pairs), default=0),
        )


@dataclass(frozen=True)
class SharedEviction:
    """An eviction of a request whose KV heads share slots, on the host.

    Attributes:
        heavy, doomed: block ids, disjoint, neither empty. fresh: those that no earlier eviction has ranked.
        slot: the request's slot in :class:`.lanes.LaneTables`.
    """

    heavy: Sequence[int]
    doomed: Sequence[int]
    fresh: Collection[int]
    slot: int


@dataclass(frozen=True)
class SharedEvictions:
    """All evictions of one step of requests whose KV heads share slots, on the device.

    Attributes:
        blocks: [E, W], int32: heavy block ids, then doomed ones, then padding; a fresh block as -1 - its id.
        counts: [E, 3], int32: numbers of heavy and doomed blocks, and the slot.
        max_heavy: host number, the most heavy blocks of one eviction. W is the most blocks of one eviction.
    """

    blocks: Tensor
    counts: Tensor
    max_heavy: int

    @classmethod
    def pack(
        cls, evictions: Sequence[SharedEviction], device: torch.device | str
    ) -> SharedEvictions:
        """Copy the evictions to the device, in one asynchronous copy."""
        width = max((len(one.heavy) + len(one.doomed) for one in evictions), default=0)
        rows = []
        for one in evictions:
            fresh = set(one.fresh)
            ids = [-1 - block if block in fresh else block for block in (*one.heavy, *one.doomed)]
            header = [len(one.heavy), len(one.doomed), one.slot, 0]
            rows.append([*header, *ids, *[0] * (width - len(ids))])
        on_gpu = torch.device(device).type == "cuda"
        packed = torch.tensor(rows, dtype=torch.int32, pin_memory=on_gpu)
        packed = packed.view(len(rows), 4 + width).to(device, non_blocking=True)
        return cls(
            blocks=packed[:, 4:],
            counts=packed[:, :3],
            max_heavy=max((len(one.heavy) for one in evictions), default=0),
        )
