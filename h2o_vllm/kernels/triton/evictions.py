# SPDX-License-Identifier: Apache-2.0
"""Arguments of compaction on the device: the KV of all layers, and a step's evictions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SCRATCH_BYTES = 32 << 20
"""Scratch of compaction in bytes, unless long prompts need more."""


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
            scratch_bytes: 8 per KV head and heavy slot of each (eviction, layer).
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
        self.scratch = torch.empty(scratch_bytes // 4, dtype=torch.int32, device=first.device)

    @property
    def word_strides(self) -> tuple[int, ...]:
        """The first three strides of a layer's keys, then of its values, in 8-byte words."""
        of_both = (self.key_caches[0].stride()[:3], self.value_caches[0].stride()[:3])
        return tuple(stride // self.words for strides in of_both for stride in strides)


class Compaction(NamedTuple):
    """One eviction on the host: ids of its heavy and doomed blocks, disjoint.

    ``fresh``: those that no earlier eviction has ranked, and ``slot``: the request's slot in
    :class:`.LaneTables`, if its KV heads share slots.
    """

    heavy: Sequence[int]
    doomed: Sequence[int]
    fresh: Collection[int] = ()
    slot: int = -1


@dataclass(frozen=True)
class Evictions:
    """Evictions of one step, on the device: of requests whose heads share slots, or of others.

    Attributes:
        blocks: [E, W], int32: heavy block ids, then doomed ones, then padding; a fresh block as -1 - its id.
            W is the most blocks of one eviction.
        counts: [E, 3], int32: numbers of heavy and doomed blocks, and the slot.
        max_heavy, max_doomed: host numbers, the largest counts.
    """

    blocks: Tensor
    counts: Tensor
    max_heavy: int
    max_doomed: int

    @classmethod
    def pack(cls, evictions: Sequence[Compaction], device: torch.device | str) -> Evictions:
        """Copy the evictions to the device, in one asynchronous copy.

        Those with an empty list move nothing and are left out.
        """
        evictions = [one for one in evictions if one.heavy and one.doomed]
        width = max((len(one.heavy) + len(one.doomed) for one in evictions), default=0)
        # The header has four numbers, so that blocks are aligned to 16 bytes.
        rows = np.zeros((len(evictions), 4 + width), dtype=np.int32)
        for row, one in zip(rows, evictions, strict=True):
            heavy, count = len(one.heavy), len(one.heavy) + len(one.doomed)
            row[:3] = heavy, len(one.doomed), one.slot
            ids = row[4 : 4 + count]
            ids[:heavy], ids[heavy:] = one.heavy, one.doomed
            if one.fresh:
                fresh = np.isin(ids, np.fromiter(one.fresh, np.int32))
                ids[fresh] = -1 - ids[fresh]
        here = torch.from_numpy(rows)
        if torch.device(device).type == "cuda":
            # ``torch.tensor`` pins no array of numpy's.
            here = here.pin_memory()
        there = here.to(device, non_blocking=True)
        return cls(
            blocks=there[:, 4:],
            counts=there[:, :3],
            max_heavy=max((len(one.heavy) for one in evictions), default=0),
            max_doomed=max((len(one.doomed) for one in evictions), default=0),
        )


def by_size(evictions: Iterable[Compaction], block_size: int) -> list[list[Compaction]]:
    """Evictions of up to 1,024 candidates, of up to 4,096, and so on, without empty classes.

    The largest of those that are packed together sizes the row of each, and its list of moves: in one class
    with a prompt of 131,072 tokens, those of a block would take as much scratch, and so more launches.
    """
    classes: dict[int, list[Compaction]] = {}
    for one in evictions:
        candidates = (len(one.heavy) + len(one.doomed)) * block_size
        power = max(0, candidates - 1).bit_length()
        classes.setdefault(max(10, power + power % 2), []).append(one)
    return list(classes.values())
