# SPDX-License-Identifier: Apache-2.0
"""What compaction is told: where the KV of all layers lies, and a step's evictions, both on the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SCRATCH_BYTES", "Evictions", "KVLayers", "SharedEviction", "SharedEvictions"]

SCRATCH_BYTES = 32 << 20
"""What compaction and rescoring hold beside the caches, unless long prompts need more."""


class KVLayers:
    """The KV of all evictable layers, reachable from one launch; made once, when the caches exist.

    Keeps the tensors alive. Owns the scratch for the lists of moves.
    """

    def __init__(
        self,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """Note where the layers lie, and allocate the scratch.

        Args:
            key_caches, value_caches: L views [N, BS, KH, D] of one shape, dtype and strides; last stride 1.
            scratch_bytes: 8 bytes per (kv head, heavy slot) of as many (eviction, layer) pairs as fit; for
                new scores see :func:`.rescores.scratch_bytes`.
        """
        self.key_caches = list(key_caches)
        self.value_caches = list(value_caches)
        first = self.key_caches[0]
        # Tokens are moved as 8-byte words, whatever the dtype: NaN keeps its payload.
        self.words = 8 // first.element_size()
        pointers = [
            [cache.data_ptr() for cache in caches]
            for caches in (self.key_caches, self.value_caches)
        ]
        self.pointers = torch.tensor(pointers, dtype=torch.int64, device=first.device)
        self.moves = torch.empty(scratch_bytes // 8, 2, dtype=torch.int32, device=first.device)
        # A list has room for one block at least, and blocks have 16 slots at least.
        lists = scratch_bytes // 8 // 16
        self.counts = torch.empty(max(1, lists), dtype=torch.int32, device=first.device)

    @property
    def nbytes(self) -> int:
        """Device memory held beside the caches."""
        return self.pointers.nbytes + self.moves.nbytes + self.counts.nbytes


@dataclass(frozen=True)
class Evictions:
    """All evictions of one step, on the device.

    Attributes:
        blocks: [E, W], int32: heavy block ids, then at once doomed ones, then padding.
        counts: [E, 2], int32: how many heavy and doomed.
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
        """(heavy ids, doomed ids) per eviction, in one asynchronous copy.

        Those with either list empty have nothing to move and are left out.
        """
        pairs = [(heavy, doomed) for heavy, doomed in pairs if heavy and doomed]
        width = max((len(heavy) + len(doomed) for heavy, doomed in pairs), default=0)
        packed = torch.tensor(
            [
                [
                    len(heavy),
                    len(doomed),
                    *heavy,
                    *doomed,
                    *[0] * (width - len(heavy) - len(doomed)),
                ]
                for heavy, doomed in pairs
            ],
            dtype=torch.int32,
            pin_memory=torch.device(device).type == "cuda",
        ).view(len(pairs), 2 + width)
        there = packed.to(device, non_blocking=True)
        return cls(
            blocks=there[:, 2:],
            counts=there[:, :2],
            max_heavy=max((len(heavy) for heavy, _ in pairs), default=0),
            max_doomed=max((len(doomed) for _, doomed in pairs), default=0),
        )


@dataclass(frozen=True)
class SharedEviction:
    """One of a request whose KV heads share slots, on the host.

    Attributes:
        heavy, doomed: block ids, disjoint, none empty. fresh: those of them that no eviction has ranked.
        slot: the request's, in :class:`.lanes.LaneTables`.
    """

    heavy: Sequence[int]
    doomed: Sequence[int]
    fresh: Collection[int]
    slot: int


@dataclass(frozen=True)
class SharedEvictions:
    """All of one step, on the device.

    Attributes:
        blocks: [E, W], int32: heavy block ids, at once doomed ones, padding; of a fresh block, -1 - its id.
        counts: [E, 3], int32: how many heavy and doomed, and the slot.
        max_heavy: host number, the most heavy blocks of one; ``blocks`` are as wide as the most in all.
    """

    blocks: Tensor
    counts: Tensor
    max_heavy: int

    @classmethod
    def pack(
        cls, evictions: Sequence[SharedEviction], device: torch.device | str
    ) -> SharedEvictions:
        """In one asynchronous copy."""
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
