# SPDX-License-Identifier: Apache-2.0
"""Evictions of one step: per layer and kv head, keep the highest-scored tokens and move their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_vllm.kernels import reference_paged

__all__ = ["Evictions", "KVLayers", "compact"]


class KVLayers:
    """The KV of all evictable layers, reachable from one launch; made once, when the caches exist.

    Keeps the tensors alive.
    """

    def __init__(self, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor]) -> None:
        """Note where the layers lie.

        Args:
            key_caches, value_caches: L views [N, BS, KH, D] of one shape, dtype and strides; last stride 1.
        """
        self.key_caches = list(key_caches)
        self.value_caches = list(value_caches)


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
        """One asynchronous copy of (heavy ids, doomed ids) per eviction. Those with either empty do nothing."""
        pairs = [(heavy, doomed) for heavy, doomed in pairs if heavy and doomed]
        width = max((len(heavy) + len(doomed) for heavy, doomed in pairs), default=0)
        pinned = torch.device(device).type == "cuda"
        packed = torch.zeros(len(pairs), 2 + width, dtype=torch.int32, pin_memory=pinned)
        for row, (heavy, doomed) in zip(packed, pairs, strict=True):
            ids = [len(heavy), len(doomed), *heavy, *doomed]
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        there = packed.to(device, non_blocking=True)
        return cls(
            there[:, 2:],
            there[:, :2],
            max((len(heavy) for heavy, _ in pairs), default=0),
            max((len(doomed) for _, doomed in pairs), default=0),
        )


def compact(layers: KVLayers, scores: Tensor, evictions: Evictions) -> None:
    """Move the survivors of a step's evictions into their heavy blocks, with their scores. Eager.

    Which tokens survive and where they go is exactly :func:`h2o_vllm.kernels.reference.compact`: the
    highest-scored candidates (heavy blocks, then doomed ones) per layer and kv head; of equal scores the one
    with the lower number, NaN lowest; survivors in heavy blocks stay. Doomed blocks are only read. Frees
    nothing.

    Args:
        layers: see there. scores: [L, N, KH, BS], float32, contiguous.
        evictions: heavy blocks are listed once among all of them, and are doomed in none.
    """
    pairs = []
    for row, (heavy, doomed) in zip(
        evictions.blocks.tolist(), evictions.counts.tolist(), strict=True
    ):
        pairs.append((row[:heavy], row[heavy : heavy + doomed]))
    reference_paged.compact(layers.key_caches, layers.value_caches, scores, pairs)
