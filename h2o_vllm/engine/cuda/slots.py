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

    Attributes:
        evicts: whether the request can evict.
        first_scored: position of its first scored query; pinned: tokens in pinned blocks.
        holes: blocks evicted so far. shared: blocks after the pinned ones with slots that KV heads share.
    """

    def __init__(self, num_slots: int) -> None:
        self.evicts: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.first_scored: NDArray[np.int32] = np.full(num_slots, NEVER, dtype=np.int32)
        self.pinned, self.holes, self.shared = np.zeros((3, num_slots), dtype=np.int32)
        self._waiting: dict[str, EvictionParams] = {}

    def start(self, policies: Mapping[str, EvictionParams]) -> None:
        """Add the requests that evict and enter the batch in this step."""
        self._waiting.update(policies)

    def release(self, request_ids: Iterable[str], slots: Mapping[str, int]) -> None:
        """Remove requests that finished or were preempted. Call it before the runner reuses their slots."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            slot = slots.get(request_id)
            if slot is not None:
                self.evicts[slot] = False
                self.first_scored[slot] = NEVER
                self.pinned[slot] = self.holes[slot] = self.shared[slot] = 0

    def place(self, slots: Mapping[str, int]) -> None:
        """Write the parameters of started requests into their slots."""
        for request_id in [one for one in self._waiting if one in slots]:
            slot, params = slots[request_id], self._waiting.pop(request_id)
            self.evicts[slot] = True
            self.first_scored[slot] = params.first_scored
            self.pinned[slot] = params.pinned
            self.holes[slot], self.shared[slot] = params.holes, 0

    @property
    def any_evicts(self) -> bool:
        """Whether any request of the runner evicts, in this batch or not."""
        return bool(self._waiting) or bool(self.evicts.any())
