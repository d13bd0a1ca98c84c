# SPDX-License-Identifier: Apache-2.0
"""Lanes: how the KV heads of a layer share its heavy slots. The rule, and its truth in plain torch.

Runs in tests, and in workers that have no C++. Imports torch only. Letters as in :mod:`.reference`. A block
is KH *lanes* of BS slots; lane ``l`` of block ``b`` is *page* ``b * KH + l`` of the cache. Every lane of a
heavy block holds tokens of one head, not always of that with its number: ``owners`` says of which.

::

    heavy blocks        b0          b1          b2          b3
    lane 0          [ head 0 ]  [ head 0 ]  [ head 0 ]  [ head 2 ]
    lane 1          [ head 1 ]  [ head 0 ]  [ head 0 ]  [ head 2 ]     head 0: 5 lanes, 1: 2, 2: 5
    lane 2          [ head 2 ]  [ head 2 ]  [ head 1 ]  [ head 2 ]

What an eviction does, layer by layer, with ``nh`` heavy and ``nd`` doomed blocks:

1. Candidates of a head: its lanes in the heavy blocks, then those in the doomed ones, both in the order of
   blocks and lanes. In a block that was never ranked, lane h is head h's.
2. All candidates of all heads are ranked together: the higher score first, NaN last; of equal ones the lower
   head, then the earlier candidate. The best ``nh * KH * BS`` are what the layer would keep.
3. Each head starts with one lane. Each further one goes to the head with the most of these best tokens beyond
   the lanes that it has; of equal ones to the lower head. (That is each head's share, rounded to lanes by the
   largest remainder.)
4. Each head keeps as many of its best tokens as its lanes hold.
5. It keeps the first of the lanes that it has; those that are given up go, in order of head, block and lane,
   to the heads that get more, in order of head.
6. Survivors in kept lanes stay; the others are copied, in order, to the free slots of the head's lanes, in
   order, those of kept lanes first. All is read before anything is written; doomed blocks are only read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def own_lanes(num_layers: int, num_blocks: int, num_heads: int) -> Tensor:
    """Owners of blocks that were never ranked: lane h is head h's; [L, n, KH], int32."""
    return torch.arange(num_heads, dtype=torch.int32).expand(num_layers, num_blocks, -1)


def share_lanes(scores: Sequence[Tensor], lanes: int, block_size: int) -> list[int]:
    """How many of ``lanes`` each head of a layer gets: steps 2 and 3.

    Args:
        scores: of each head's candidates, float32, a whole number of lanes each, NaN replaced by -infinity.
    """
    heads = torch.cat(
        [torch.full_like(one, head, dtype=torch.int64) for head, one in enumerate(scores)]
    )
    best = torch.cat(list(scores)).argsort(descending=True, stable=True)[: lanes * block_size]
    wanted = heads[best].bincount(minlength=len(scores)).tolist()
    given = [1] * len(scores)
    for _ in range(lanes - sum(given)):
        needs = [want - has * block_size for want, has in zip(wanted, given, strict=True)]
        given[needs.index(max(needs))] += 1
    return given


def compact(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    scores: Tensor,
    heavy: Sequence[int],
    doomed: Sequence[int],
    owners: Tensor | None = None,
) -> Tensor | None:
    """Move the survivors of one eviction into its heavy blocks, with their scores; see above. Frees nothing.

    Args:
        key_caches, value_caches: L views [N, BS, KH, D] each. scores: [L, N, KH, BS], float32.
        heavy, doomed: block ids, disjoint; heavy ones must be writable. With either empty nothing happens.
        owners: [L, nh + nd, KH]: which head has each lane of the heavy and doomed blocks. ``None``: each head
            shares with none, and is ranked alone.

    Returns:
        [L, nh, KH], int32: which head has each lane of the heavy blocks now; ``None`` without owners.
    """
    if not (heavy and doomed):
        return None if owners is None else owners[:, : len(heavy)]
    if owners is None:
        one_headed = torch.zeros(len(scores), len(heavy) + len(doomed), 1, device=scores.device)
        for head in range(scores.shape[2]):
            only = slice(head, head + 1)
            one_keys = [cache[:, :, only] for cache in key_caches]
            one_values = [cache[:, :, only] for cache in value_caches]
            compact(one_keys, one_values, scores[:, :, only], heavy, doomed, one_headed)
        return None
    num_heads, block_size = scores.shape[2:]
    blocks = torch.tensor([*heavy, *doomed], device=scores.device)
    now = torch.empty_like(owners[:, : len(heavy)], dtype=torch.int32)
    for layer, (keys, values) in enumerate(zip(key_caches, value_caches, strict=True)):
        # Per head [n, 2]: the place of a block among these, and a lane.
        pages = [(owners[layer] == head).nonzero() for head in range(num_heads)]
        # Per head [n * BS] each: block, lane and slot of its candidates.
        places = [_slots(blocks[page[:, 0]], page[:, 1], block_size) for page in pages]
        ranked = [scores[layer][place].nan_to_num(nan=float("-inf"), posinf=float("inf"),
                                                  neginf=float("-inf")) for place in places]  # fmt: skip
        given = share_lanes(ranked, len(heavy) * num_heads, block_size)
        owned = [int((page[:, 0] < len(heavy)).sum()) for page in pages]
        given_up = torch.cat(
            [page[lanes:has] for page, lanes, has in zip(pages, given, owned, strict=True)]
        )
        moves = []
        for head, lanes in enumerate(given):
            kept = min(owned[head], lanes)
            more, given_up = given_up[: lanes - kept], given_up[lanes - kept :]
            mine = torch.cat([pages[head][:kept], more])
            now[layer, mine[:, 0], mine[:, 1]] = head
            best = ranked[head].argsort(descending=True, stable=True)[: lanes * block_size]
            stays = torch.zeros_like(ranked[head], dtype=torch.bool)
            stays[best] = True
            source = stays.nonzero().flatten()
            source = source[source >= kept * block_size]
            free = torch.ones(lanes * block_size, dtype=torch.bool, device=scores.device)
            free[: kept * block_size] = ~stays[: kept * block_size]
            target = _slots(blocks[mine[:, 0]], mine[:, 1], block_size)
            moves.append(
                (tuple(one[source] for one in places[head]), tuple(one[free] for one in target))
            )
        held = [
            (keys[block, slot, lane], values[block, slot, lane], scores[layer, block, lane, slot])
            for (block, lane, slot), _ in moves
        ]
        for (key, value, score), (_, (block, lane, slot)) in zip(held, moves, strict=True):
            keys[block, slot, lane], values[block, slot, lane] = key, value
            scores[layer, block, lane, slot] = score
    return now


def _slots(blocks: Tensor, lanes: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block, lane and slot of all tokens of some pages, [n] each: [n * BS] each."""
    slots = torch.arange(block_size, device=blocks.device).repeat(len(blocks))
    return blocks.repeat_interleave(block_size), lanes.repeat_interleave(block_size), slots
