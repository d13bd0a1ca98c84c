# SPDX-License-Identifier: Apache-2.0
"""Which head has which lane, of requests whose heads share slots. Worker process, CPU only.

Lives from a request's eviction to its next one; the rule is :mod:`h2o_vllm.kernels.lanes`. No vLLM.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.lanes import own_lanes

_NO_SLOT = -1
"""In place of a slot: a row whose heads share nothing."""


@dataclass
class _Shared:
    """The heavy blocks of a request, in table order, and the heads of their lanes, [L, nh, KH], int32."""

    slot: int
    heavy_blocks: tuple[int, ...]
    owners: torch.Tensor


class LaneStore:
    """What :class:`h2o_vllm.kernels.cpu.Lanes` says of a batch, kept in slots, one for each request.

    Args:
        num_layers, num_heads: evictable layers, and KV heads of each.
    """

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self._shape = (num_layers, num_heads)
        self._requests: dict[str, _Shared] = {}
        self._free: list[int] = []
        # [L, S, KH, MP], [L, S, KH], [S]
        self._pages = torch.zeros(num_layers, 0, num_heads, 0, dtype=torch.int32)
        self._counts = torch.zeros(num_layers, 0, num_heads, dtype=torch.int32)
        self._heavy = torch.zeros(0, dtype=torch.int32)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def owners(self, request_id: str, blocks: Sequence[int]) -> torch.Tensor:
        """The head that has each lane of some of a request's blocks, [L, n, KH], int32.

        Lane h of a block that no eviction has ranked is head h's.
        """
        layers, heads = self._shape
        owners = own_lanes(layers, len(blocks), heads).clone()
        shared = self._requests.get(request_id)
        if shared is not None:
            places = {block: place for place, block in enumerate(shared.heavy_blocks)}
            known = [(i, places[block]) for i, block in enumerate(blocks) if block in places]
            if known:
                to, come = torch.tensor(known).T
                owners[:, to] = shared.owners[:, come]
        return owners

    def keep(self, request_id: str, heavy_blocks: Sequence[int], owners: torch.Tensor) -> None:
        """Set the heads that have the lanes of a request's heavy blocks, [L, nh, KH], int32."""
        pages, counts = _by_owner(heavy_blocks, owners)
        before = self._requests.get(request_id)
        slot = self._slot(int(counts.max())) if before is None else before.slot
        if counts.max() > self._pages.shape[3]:
            self._grow(self._heavy.numel(), 2 * int(counts.max()))
        self._requests[request_id] = _Shared(slot, tuple(heavy_blocks), owners)
        there = torch.arange(self._pages.shape[3]) < counts[:, :, None]
        self._pages[:, slot][there] = pages.flatten()
        self._counts[:, slot] = counts.int()
        self._heavy[slot] = len(heavy_blocks)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that hold no heavy block any more. Unknown ids are fine."""
        for request_id in request_ids:
            shared = self._requests.pop(request_id, None)
            if shared is not None:
                self._free.append(shared.slot)

    def heavy_blocks(self, request_ids: Sequence[str]) -> dict[int, tuple[int, ...]]:
        """By row of a batch of these requests: the heavy blocks of those whose heads share some."""
        return {
            row: self._requests[request_id].heavy_blocks
            for row, request_id in enumerate(request_ids)
            if request_id in self._requests
        }

    def of_rows(self, request_ids: Sequence[str], num_rows: int) -> list[kernels.Lanes]:
        """For each layer, what a batch's rows share; ``num_rows`` with padding rows behind the requests."""
        rows = torch.full((num_rows,), _NO_SLOT, dtype=torch.int32)
        for row, request_id in enumerate(request_ids):
            shared = self._requests.get(request_id)
            if shared is not None:
                rows[row] = shared.slot
        return [
            kernels.Lanes(rows, pages, counts, self._heavy)
            for pages, counts in zip(self._pages, self._counts, strict=True)
        ]

    def _slot(self, width: int) -> int:
        if not self._free:
            slots = self._heavy.numel()
            more = max(4, slots)
            self._grow(slots + more, max(width, self._pages.shape[3]))
            self._free = list(range(slots, slots + more))
        return self._free.pop()

    def _grow(self, slots: int, width: int) -> None:
        old = (self._pages, self._counts, self._heavy)
        layers, heads = self._shape
        self._pages = torch.zeros(layers, slots, heads, width, dtype=torch.int32)
        self._counts = torch.zeros(layers, slots, heads, dtype=torch.int32)
        self._heavy = torch.zeros(slots, dtype=torch.int32)
        pages, counts, heavy = old
        self._pages[:, : pages.shape[1], :, : pages.shape[3]] = pages
        self._counts[:, : counts.shape[1]] = counts
        self._heavy[: heavy.numel()] = heavy


def _by_owner(blocks: Sequence[int], owners: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of some blocks, sorted by owner, [L, n * KH], int32, and how many each head has, [L, KH].

    Args:
        owners: [L, n, KH]. Pages of one owner stay in the order of blocks and lanes.
    """
    heads, flat = owners.shape[2], owners.flatten(1).long()
    pages = torch.tensor(blocks, dtype=torch.int32)[:, None] * heads
    pages = (pages + torch.arange(heads, dtype=torch.int32)).flatten()
    counts = torch.zeros(len(flat), heads, dtype=torch.int64)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    return pages[flat.argsort(dim=1, stable=True)], counts
