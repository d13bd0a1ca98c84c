# SPDX-License-Identifier: Apache-2.0
"""What rescoring is told: a step's evictions whose candidates get new scores before they are ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "BY_KEYS",
    "BY_LATE",
    "BY_RANKS",
    "BY_VALUES",
    "HEADER",
    "PER_QUERY",
    "Rescore",
    "Rescores",
    "scratch_bytes",
]

PER_QUERY = 1
"""A fresh token's sum becomes what it would be, had all queries so far seen the token."""
BY_VALUES = 2
"""It is multiplied by how far the token's value is from the candidates' mean, relative to the mean one."""
BY_KEYS = 4
"""Minus the cosine of a key and the mean of the normalised ones is the score, of all candidates anew. With
nothing else."""
BY_RANKS = 8
"""Fresh tokens are ranked by sums and by keys, and each gets the sum that stands at the better rank; if that
is the one by keys, a little less than it."""
BY_LATE = 16
"""And by what late queries have given to it or its neighbours, before keys; the sums are its own. With
``BY_RANKS``."""

LISTS = 4
"""Numbers in the scratch per fresh token: its sum, its score by keys, the sums in order, its rank by keys."""
LISTS_IF_LATE = 6
"""With its score by late queries, and its rank by them."""
HEADER = 8
"""Numbers before an entry's block ids: known blocks, all blocks, then as in :class:`Rescore`."""


def scratch_bytes(kv_heads: int, tokens: int) -> int:
    """What the scratch needs for one layer of an eviction that ranks ``tokens`` fresh tokens."""
    return LISTS_IF_LATE * 4 * kv_heads * tokens


@dataclass(frozen=True)
class Rescore:
    """One eviction, on the host.

    Attributes:
        known: ids of the blocks that earlier evictions have ranked; their tokens lie in any order.
        fresh: ids of the others, in the order of their tokens' positions.
        how: sum of the constants above, or 0.
        fresh_from: position of the first fresh token. seen: queries so far.
        protected: how many fresh tokens, the first ones, are protected, if ``how`` is ``BY_KEYS``: whatever
            their scores, which may be others'. All other protected tokens have infinite ones.
        reach: a fresh token gets the highest score among those up to this many fresh tokens away, which count
            a little less the farther they are; if ``BY_LATE``, of late queries alone.
    """

    known: Sequence[int]
    fresh: Sequence[int]
    how: int = 0
    fresh_from: int = 0
    seen: int = 0
    protected: int = 0
    reach: int = 0
    slot: int = -1

    @property
    def staged(self) -> bool:
        """Whether new scores depend on others' old ones, and so go through the scratch."""
        return self.reach > 0 or self.how & BY_RANKS != 0


@dataclass(frozen=True)
class Rescores:
    """All of one step, on the device.

    Attributes:
        table: [E, HEADER + W], int32: header, ids of known blocks, at once those of fresh ones, padding.
        max_staged: host number, the most fresh blocks of one that is staged; 0: none is.
        lists: host number, how many numbers per fresh token the scratch takes for it.
        shares: whether the heads of any share slots.
    """

    table: Tensor
    max_staged: int
    lists: int = LISTS
    shares: bool = False

    @classmethod
    def pack(cls, rescores: Sequence[Rescore], device: torch.device | str) -> Rescores:
        """In one asynchronous copy."""
        width = max((len(one.known) + len(one.fresh) for one in rescores), default=0)
        rows = []
        for one in rescores:
            blocks = [*one.known, *one.fresh]
            header = [len(one.known), len(blocks), one.how, one.fresh_from, one.seen]
            header += [one.protected, one.reach, one.slot]
            rows.append([*header, *blocks, *[0] * (width - len(blocks))])
        packed = torch.tensor(
            rows, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda"
        ).view(len(rows), HEADER + width)
        return cls(
            table=packed.to(device, non_blocking=True),
            max_staged=max((len(one.fresh) for one in rescores if one.staged), default=0),
            lists=LISTS_IF_LATE if any(one.how & BY_LATE for one in rescores) else LISTS,
            shares=any(one.slot >= 0 for one in rescores),
        )
