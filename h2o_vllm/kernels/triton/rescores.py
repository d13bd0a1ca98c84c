# SPDX-License-Identifier: Apache-2.0
"""Arguments of rescoring: a step's evictions whose candidates get new scores before they are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_vllm.policy.ranks import RANKS, Op

__all__ = ["HEADER", "Rescore", "Rescores", "scratch_bytes"]

MOST_RANKS = sum(bool(rank.joins and rank.op) for rank in RANKS)
"""The most ranks that may be joined."""
HEADER = 7
"""Numbers before an entry's block ids: count of known blocks, of all blocks, fields of :class:`Rescore`."""


MOST_SEGMENTS = 64
"""The most programs that share the candidates of one (eviction, layer, head)."""
SEGMENT = 1024
"""Candidates per program, if fewer programs are enough."""


def lists_of(ranks: int) -> int:
    """Numbers in the scratch per fresh token: a score and a place per rank, and a sorted score."""
    return 2 * ranks + 1 if ranks > 1 else 1


def sums_of(segments: int, padded: int) -> int:
    """Numbers in the scratch per (layer, head) for the sums of ``segments`` programs.

    Args:
        padded: the head size, rounded up to a power of 2.
    """
    return segments * (2 * padded + 1) if segments > 1 else 1


def scratch_bytes(kv_heads: int, tokens: int, of_heads: int = 0) -> int:
    """Bytes of scratch for one layer of an eviction that ranks ``tokens`` fresh tokens.

    Args:
        of_heads: number of heads for which a rank sums predictions: 0, its own, or all of the model.
    """
    of_head = lists_of(MOST_RANKS) * tokens + sums_of(MOST_SEGMENTS, 256)
    return 4 * (kv_heads * of_head + of_heads * tokens)


@dataclass(frozen=True)
class Rescore:
    """One eviction, on the host.

    Attributes:
        known: ids of the blocks that earlier evictions have ranked. Their tokens are in any order.
        fresh: ids of the other blocks, in the order of their tokens' positions.
        ops: operations of the policy's ranks; several are joined. ``Op.NOTHING``: scores do not change.
        fresh_from: position of the first fresh token. seen: queries so far.
        first_head: number of the first head of this worker's first layer, see :func:`.head_number`.
        slot: the request's slot, if its KV heads share the slots of known blocks; else -1.
    """

    known: Sequence[int]
    fresh: Sequence[int]
    ops: Op = Op.NOTHING
    fresh_from: int = 0
    seen: int = 0
    first_head: int = 0
    slot: int = -1

    @property
    def staged(self) -> bool:
        """Whether a new score depends on scores of other tokens, and so goes through the scratch."""
        return self.ops.bit_count() > 1 or bool(self.ops & (Op.PREDICTED | Op.END | Op.VALUE))


@dataclass(frozen=True)
class Rescores:
    """All rescored evictions of one step, on the device.

    Attributes:
        table: [E, HEADER + W], int32: header, ids of known blocks, then of fresh ones, then padding.
        max_staged: host number, the most fresh blocks of a staged eviction; 0: none is staged.
        ranks: host number, the most joined ranks of a staged eviction; 0: none is staged.
        shares: whether the heads of any request share slots. predicts: whether any uses ``predicted``.
    """

    table: Tensor
    max_staged: int
    ranks: int = 1
    shares: bool = False
    predicts: bool = False

    @classmethod
    def pack(cls, rescores: Sequence[Rescore], device: torch.device | str) -> Rescores:
        """Copy the evictions to the device, in one asynchronous copy."""
        width = max((len(one.known) + len(one.fresh) for one in rescores), default=0)
        rows = []
        for one in rescores:
            blocks = [*one.known, *one.fresh]
            header = [len(one.known), len(blocks), int(one.ops), one.fresh_from, one.seen]
            header += [one.first_head, one.slot]
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
