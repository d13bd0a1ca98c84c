# SPDX-License-Identifier: Apache-2.0
"""Who in a batch evicts, who is scored, and which kernels serve the batch. Worker process.

Pure bookkeeping on the host, from counts: no vLLM, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from h2o_vllm.config import POLICIES
from h2o_vllm.kernels.triton import EVICTING, SCORED
from h2o_vllm.policy import Policy, get_policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

__all__ = ["PolicySlots", "StepRows", "StepVariant", "Variant"]


class Variant(Enum):
    """Which kernels serve a batch.

    A replayed CUDA graph cannot branch on its batch, so each variant is captured on its own
    and the step picks one: a batch without budgets then launches exactly what stock vLLM launches.
    """

    STOCK = "stock"
    """vLLM's attention alone: nobody in the batch evicts."""
    MIXED = "mixed"
    """vLLM's attention, which skips the scored decodes (length 0), then ours, which skips the rest."""
    SCORED = "scored"
    """Ours alone: every row decodes and is scored."""


@dataclass
class StepVariant:
    """Shared by the metadata builder, which decides, and the graph manager, which obeys.

    Attributes:
        current: of the batch whose metadata was built last.
        capturing: what a CUDA graph is being captured for, or ``None``.
    """

    current: Variant = Variant.STOCK
    capturing: Variant | None = None


_TABLE: tuple[Policy | None, ...] = (None, *(get_policy(name) for name in POLICIES))
"""Policy by code; code 0 is a request that never evicts."""
_CODES = {name: code for code, name in enumerate(POLICIES, start=1)}
_SCORES = np.array([policy is not None and policy.scores_attention for policy in _TABLE])
_MOVES = np.array([policy is not None and policy.moves_tokens for policy in _TABLE])


class PolicySlots:
    """Policy codes of the requests in the runner's request table, by slot.

    A request's slot exists only once the runner has added it, hence the two steps ``start`` (with
    the scheduler's plan) and ``place`` (when the batch is known).

    Args:
        num_slots: requests the runner can hold.
    """

    def __init__(self, num_slots: int) -> None:
        self._codes: NDArray[np.int8] = np.zeros(num_slots, dtype=np.int8)
        self._waiting: dict[str, int] = {}
        self._placed: set[int] = set()

    def start(self, policies: Mapping[str, str]) -> None:
        """Requests (id -> policy name) that evict and enter the batch in this step."""
        for request_id, name in policies.items():
            self._waiting[request_id] = _CODES[name]

    def release(self, request_ids: Iterable[str], slots: Mapping[str, int]) -> None:
        """Requests that leave (finished or preempted), before the runner reuses their slots."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            slot = slots.get(request_id)
            if slot is not None:
                self._codes[slot] = 0
                self._placed.discard(slot)

    def place(self, slots: Mapping[str, int]) -> None:
        """Look up the slots of the requests that were started."""
        for request_id in [one for one in self._waiting if one in slots]:
            slot = slots[request_id]
            self._codes[slot] = self._waiting.pop(request_id)
            self._placed.add(slot)

    def codes(self, slots: NDArray[np.intp]) -> NDArray[np.int8] | None:
        """Policy code per batch row, or ``None`` if nobody in the batch evicts."""
        if not self._placed:
            return None
        codes = self._codes[slots]
        return codes if codes.any() else None


@dataclass(frozen=True)
class StepRows:
    """One batch, seen from the host.

    Attributes:
        codes: policy code per row, [B], int8; padding rows have 0.
        query_lens: [B], int32. seq_lens: logical lengths, this step's tokens included, [B], int32.
    """

    codes: NDArray[np.int8]
    query_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]

    @classmethod
    def of(
        cls, codes: NDArray[np.int8], starts: NDArray[np.int32], seq_lens: NDArray[np.int32]
    ) -> StepRows:
        """From the codes of the real rows and ``starts``, [B + 1], which may have padding rows."""
        padded = np.zeros(len(starts) - 1, dtype=np.int8)
        padded[: len(codes)] = codes
        return cls(padded, np.diff(starts), seq_lens)

    @property
    def scored(self) -> NDArray[np.bool_]:
        """[B]: rows whose attention probabilities are added up."""
        scored: NDArray[np.bool_] = _SCORES[self.codes]
        return scored

    @property
    def decodes(self) -> NDArray[np.bool_]:
        """[B]: scored rows with one query: our kernel attends for them."""
        return self.scored & (self.query_lens == 1)

    @property
    def prompts(self) -> NDArray[np.bool_]:
        """[B]: scored rows with several queries: vLLM's kernel attends, ours only scores."""
        return self.scored & (self.query_lens > 1)

    @property
    def variant(self) -> Variant:
        """Which kernels serve this batch; never STOCK, see :meth:`PolicySlots.codes`."""
        idle = self.query_lens == 0
        return Variant.SCORED if bool((self.decodes | idle).all()) else Variant.MIXED

    @property
    def flags(self) -> NDArray[np.int8]:
        """[B]: as ``compact_tables`` wants them; "scored" are those that our kernel attends."""
        flags = np.where(self.codes > 0, EVICTING, 0) | np.where(self.decodes, SCORED, 0)
        return flags.astype(np.int8)

    def new_tokens(self) -> Iterator[tuple[Policy, NDArray[np.int64] | None, NDArray[np.int64]]]:
        """The tokens of this step whose evictions will rank them, together for all rows of a policy.

        Yields:
            policy; positions in the batch, ``None`` for all of it; logical positions in their
            sequences; int64.
        """
        by_token = np.repeat(self.codes, self.query_lens)
        first = np.repeat(np.cumsum(self.query_lens) - self.query_lens, self.query_lens)
        before = np.repeat(self.seq_lens - self.query_lens, self.query_lens)
        positions = np.arange(len(by_token), dtype=np.int64) - first + before
        for code in np.unique(self.codes):
            policy = _TABLE[code]
            if policy is not None and _MOVES[code]:
                tokens = np.flatnonzero(by_token == code)
                if len(tokens) == len(by_token):
                    yield policy, None, positions
                else:
                    yield policy, tokens, positions[tokens]
