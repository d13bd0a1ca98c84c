# SPDX-License-Identifier: Apache-2.0
"""Eviction parameters of requests by slot of model runner V2's request table. Worker process; no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from h2o_vllm.policy.ranks import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from h2o_vllm.blocks.plan import EvictionParams


class PolicySlots:
    """Eviction parameters of requests, in arrays by slot of the runner's request table.

    A request has a slot only after the runner has added it. So ``start`` takes the parameters with the
    scheduler's plan, and ``place`` writes them once the slot is known.

    Args:
        num_slots: number of requests that the runner can hold.
    """

    def __init__(self, num_slots: int) -> None:
        self._evicts: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self._first_scored: NDArray[np.int32] = np.full(num_slots, NEVER, dtype=np.int32)
        self._pinned: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._holes: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._shared: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._waiting: dict[str, EvictionParams] = {}
        self._placed: set[int] = set()

    def start(self, policies: Mapping[str, EvictionParams]) -> None:
        """Add the requests that evict and enter the batch in this step."""
        self._waiting.update(policies)

    def release(self, request_ids: Iterable[str], slots: Mapping[str, int]) -> None:
        """Remove requests that finished or were preempted. Call it before the runner reuses their slots."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            slot = slots.get(request_id)
            if slot is not None:
                self._evicts[slot] = False
                self._first_scored[slot] = NEVER
                self._pinned[slot] = self._holes[slot] = self._shared[slot] = 0
                self._placed.discard(slot)

    def place(self, slots: Mapping[str, int]) -> None:
        """Write the parameters of started requests into their slots."""
        for request_id in [one for one in self._waiting if one in slots]:
            slot, params = slots[request_id], self._waiting.pop(request_id)
            self._evicts[slot] = True
            self._first_scored[slot] = params.first_scored
            self._pinned[slot] = params.pinned
            self._holes[slot], self._shared[slot] = params.holes, 0
            self._placed.add(slot)

    @property
    def any_evicts(self) -> bool:
        """Whether any request of the runner evicts, in this batch or not."""
        return bool(self._placed or self._waiting)

    def punched(self, slot: int, count: int) -> None:
        """Add ``count`` evicted blocks to the request in ``slot``."""
        self._holes[slot] += count

    def share(self, slot: int, count: int) -> None:
        """Set how many blocks after the pinned ones have slots that the KV heads share."""
        self._shared[slot] = count

    def evicts(self, slots: NDArray[np.intp]) -> NDArray[np.bool_] | None:
        """Which batch rows can evict, or ``None`` if none can."""
        if not self._placed:
            return None
        evicts = self._evicts[slots]
        return evicts if evicts.any() else None

    def first_scored(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Position of the first scored query per batch row."""
        return self._first_scored[slots]

    def pinned(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Tokens in pinned blocks per batch row."""
        return self._pinned[slots]

    def holes(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Blocks evicted so far per batch row."""
        return self._holes[slots]

    def shared(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Blocks with slots that the KV heads share, per batch row."""
        return self._shared[slots]
