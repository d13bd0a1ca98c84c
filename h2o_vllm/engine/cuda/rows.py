# SPDX-License-Identifier: Apache-2.0
"""Who in a batch evicts, who is scored, and which kernels serve the batch. Worker process.

Pure bookkeeping on the host, from counts: no vLLM, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from h2o_vllm.config import POLICIES
from h2o_vllm.kernels.triton import EVICTING, SCORED
from h2o_vllm.policy import Policy, get_policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from h2o_vllm.blocks.plan import EvictionParams

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
_LAST_QUERY_ONLY = np.array([policy is not None and policy.last_query_only for policy in _TABLE])
_ALL = np.iinfo(np.int32).max
_PROMPT_QUERIES = np.array(
    [
        _ALL if policy is None or policy.scored_prompt_queries is None
        else policy.scored_prompt_queries
        for policy in _TABLE
    ],
    dtype=np.int32,
)  # fmt: skip


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
                self._codes[slot] = 0
                self._placed.discard(slot)

    def place(self, slots: Mapping[str, int]) -> None:
        """Look up the slots of the requests that were started."""
        for request_id in [one for one in self._waiting if one in slots]:
            slot, terms = slots[request_id], self._waiting.pop(request_id)
            self._codes[slot] = _CODES[terms.policy]
            self._prompt_tokens[slot] = terms.prompt_tokens
            self._sinks[slot] = terms.sinks
            self._placed.add(slot)

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


@dataclass(frozen=True)
class StepRows:
    """One batch, seen from the host.

    Attributes:
        codes: policy code per row, [B], int8; padding rows have 0.
        query_lens: [B], int32. seq_lens: logical lengths, this step's tokens included, [B], int32.
        prompt_tokens: [B], int32. sinks: protected first tokens, [B], int32.
    """

    codes: NDArray[np.int8]
    query_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    sinks: NDArray[np.int32]

    @classmethod
    def of(
        cls,
        codes: NDArray[np.int8],
        starts: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        prompt_tokens: NDArray[np.int32],
        sinks: NDArray[np.int32],
    ) -> StepRows:
        """From what is known of the real rows, and ``starts``, [B + 1], which may have padding rows."""
        rows = len(starts) - 1

        def padded(values: NDArray[Any]) -> NDArray[Any]:
            return np.pad(values, (0, rows - len(values)))

        return cls(padded(codes), np.diff(starts), seq_lens, padded(prompt_tokens), padded(sinks))

    @cached_property
    def scored_queries(self) -> NDArray[np.int32]:
        """[B]: how many of a row's queries, the last ones, have their probabilities added up.

        See :meth:`h2o_vllm.engine.cpu.rows.EvictionParams.scored_queries`, which says the same of one row.
        """
        first = np.maximum(self.prompt_tokens - _PROMPT_QUERIES[self.codes], 0)
        most = np.where(
            _LAST_QUERY_ONLY[self.codes], np.minimum(self.query_lens, 1), self.query_lens
        )
        counts: NDArray[np.int32] = np.where(
            _SCORES[self.codes], np.clip(self.seq_lens - first, 0, most), 0
        )
        return counts

    @property
    def decodes(self) -> NDArray[np.bool_]:
        """[B]: rows with one query, which is scored: our kernel attends for them."""
        return (self.scored_queries == 1) & (self.query_lens == 1)

    @property
    def prompts(self) -> NDArray[np.bool_]:
        """[B]: rows with several queries, scored ones among them: vLLM's kernel attends, ours scores."""
        return (self.scored_queries > 0) & (self.query_lens > 1)

    @property
    def last_query_rows(self) -> NDArray[np.bool_]:
        """[B]: scored rows of a policy that counts the newest query alone."""
        clearing: NDArray[np.bool_] = _LAST_QUERY_ONLY[self.codes] & (self.scored_queries > 0)
        return clearing

    @property
    def protected_tokens(self) -> NDArray[np.int64]:
        """Positions in the batch of the first tokens that must stay."""
        before = self.seq_lens - self.query_lens
        rows = np.flatnonzero(_MOVES[self.codes] & (before < self.sinks))
        starts = np.cumsum(self.query_lens) - self.query_lens
        counts = np.minimum(self.query_lens, self.sinks - before)
        return np.concatenate(
            [np.arange(starts[row], starts[row] + counts[row], dtype=np.int64) for row in rows]
            or [np.zeros(0, dtype=np.int64)]
        )

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
