# SPDX-License-Identifier: Apache-2.0
"""What rescoring is told: a step's evictions whose candidates get new scores before they are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_vllm.policy.ranks import Op

__all__ = ["HEADER", "Rescore", "Rescores", "scratch_bytes"]

MOST_RANKS = 6
"""Ranks that may be joined: of ``Op``, predicted, attention, mean, value, end and key."""
HEADER = 7
"""Numbers before an entry's block ids: known blocks, all blocks, then as in :class:`Rescore`."""


MOST_SEGMENTS = 64
"""Programs that share the candidates of one (eviction, layer, head), at most."""
SEGMENT = 1024
"""Candidates of each, where fewer programs are enough."""


def lists_of(ranks: int) -> int:
    """Numbers in the scratch per fresh token: a score and a place by each rank, a score in order."""
    return 2 * ranks + 1 if ranks > 1 else 1


def sums_of(segments: int, padded: int) -> int:
    """Numbers in the scratch per (layer, head) for what ``segments`` programs add up.

    Args:
        padded: the head size, as a power of 2.
    """
    return segments * (2 * padded + 1) if segments > 1 else 1


def scratch_bytes(kv_heads: int, tokens: int, of_heads: int = 0) -> int:
    """What the scratch needs for one layer of an eviction that ranks ``tokens`` fresh tokens.

    Args:
        of_heads: for which a rank adds up what is predicted: 0, its own, or all of the model's.
    """
    of_head = lists_of(MOST_RANKS) * tokens + sums_of(MOST_SEGMENTS, 256)
    return 4 * (kv_heads * of_head + of_heads * tokens)


@dataclass(frozen=True)
class Rescore:
    """One eviction, on the host.

    Attributes:
        known: ids of the blocks that earlier evictions have ranked; their tokens lie in any order.
        fresh: ids of the others, in the order of their tokens' positions.
        ops: those of the policy's ranks, or none: nothing changes. Several are joined.
        fresh_from: position of the first fresh token. seen: queries so far.
        first_kv_head: number of this worker's first KV head in the model.
        slot: the request's, if its KV heads share the slots of known blocks; else -1.
    """

    known: Sequence[int]
    fresh: Sequence[int]
    ops: Op = Op.NOTHING
    fresh_from: int = 0
    seen: int = 0
    first_kv_head: int = 0
    slot: int = -1

    @property
    def staged(self) -> bool:
        """Whether new scores depend on more than the token's old one, and so go through the scratch."""
        return self.ops.bit_count() > 1 or bool(self.ops & (Op.PREDICTED | Op.END | Op.VALUE))


@dataclass(frozen=True)
class Rescores:
    """All of one step, on the device.

    Attributes:
        table: [E, HEADER + W], int32: header, ids of known blocks, at once those of fresh ones, padding.
        max_staged: host number, the most fresh blocks of one that is staged; 0: none is.
        ranks: host number, the most that are joined of one that is staged; 0: none is.
        shares: whether the heads of any share slots. predicts: whether any ranks by what is predicted.
    """

    table: Tensor
    max_staged: int
    ranks: int = 1
    shares: bool = False
    predicts: bool = False

    @classmethod
    def pack(cls, rescores: Sequence[Rescore], device: torch.device | str) -> Rescores:
        """In one asynchronous copy."""
        width = max((len(one.known) + len(one.fresh) for one in rescores), default=0)
        rows = []
        for one in rescores:
            blocks = [*one.known, *one.fresh]
            header = [len(one.known), len(blocks), int(one.ops), one.fresh_from, one.seen]
            header += [one.first_kv_head, one.slot]
            rows.append([*header, *blocks, *[0] * (width - len(blocks))])
        packed = torch.tensor(
            rows, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda"
        ).view(len(rows), HEADER + width)
        return cls(
            table=packed.to(device, non_blocking=True),
            max_staged=max((len(one.fresh) for one in rescores if one.staged), default=0),
            ranks=max((one.ops.bit_count() for one in rescores if one.staged), default=0),
            shares=any(one.slot >= 0 for one in rescores),
            predicts=any(one.ops & Op.PREDICTED for one in rescores),
        )
