# SPDX-License-Identifier: Apache-2.0
"""Policies of the requests in model runner V2's request table, by slot. Worker process; no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from h2o_vllm.engine.rows import POLICY_CODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from h2o_vllm.blocks.plan import EvictionParams

__all__ = ["PolicySlots"]


class PolicySlots:
    """Policies of the requests in the runner's request table, and what they depend on, by slot.

    A request's slot exists only once the runner has added it, hence the two steps ``start`` (with
    the scheduler's plan) and ``place`` (when the batch is known).

    Args:
        num_slots: requests the runner can hold.
    """

    def __init__(self, num_slots: int) -> None:
        self._codes: NDArray[np.int8] = np.zeros(num_slots, dtype=np.int8)
        self._prompt_tokens: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._sinks: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._pinned: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._holes: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._shared: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)
        self._waiting: dict[str, EvictionParams] = {}
        self._placed: set[int] = set()

    def start(self, policies: Mapping[str, EvictionParams]) -> None:
        """Requests that evict and enter the batch in this step."""
        self._waiting.update(policies)

    def release(self, request_ids: Iterable[str], slots: Mapping[str, int]) -> None:
        """Requests that leave (finished or preempted), before the runner reuses their slots."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            slot = slots.get(request_id)
            if slot is not None:
                self._codes[slot] = self._pinned[slot] = self._shared[slot] = 0
                self._placed.discard(slot)

    def place(self, slots: Mapping[str, int]) -> None:
        """Look up the slots of the requests that were started."""
        for request_id in [one for one in self._waiting if one in slots]:
            slot, params = slots[request_id], self._waiting.pop(request_id)
            self._codes[slot] = POLICY_CODES[params.policy]
            self._prompt_tokens[slot] = params.prompt_tokens
            self._sinks[slot] = params.sinks
            self._pinned[slot] = params.pinned
            self._holes[slot] = self._shared[slot] = 0
            self._placed.add(slot)

    def punched(self, slot: int, count: int) -> None:
        """``count`` more blocks of the request in ``slot`` have been evicted."""
        self._holes[slot] += count

    def share(self, slot: int, count: int) -> None:
        """KV heads share the slots of the first ``count`` blocks behind the pinned ones, from now on."""
        self._shared[slot] = count

    def codes(self, slots: NDArray[np.intp]) -> NDArray[np.int8] | None:
        """Policy code per batch row, or ``None`` if nobody in the batch evicts."""
        if not self._placed:
            return None
        codes = self._codes[slots]
        return codes if codes.any() else None

    def prompt_tokens(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Per batch row, for the rows whose code is not 0."""
        return self._prompt_tokens[slots]

    def sinks(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Protected first tokens per batch row, for the rows whose code is not 0."""
        return self._sinks[slots]

    def pinned(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Tokens in pinned blocks per batch row, 0 for the rows whose code is 0."""
        return self._pinned[slots]

    def holes(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Blocks evicted so far per batch row, for the rows whose code is not 0."""
        return self._holes[slots]

    def shared(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Blocks whose slots KV heads share, per batch row."""
        return self._shared[slots]
