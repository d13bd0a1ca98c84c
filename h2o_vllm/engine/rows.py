# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch, from counts alone: who evicts, whose queries are scored, which tokens are new.

Worker process, any device. Numpy on the host: no vLLM, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from h2o_vllm.config.policies import POLICIES
from h2o_vllm.policy import Policy, get_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["POLICY_CODES", "StepRows"]

POLICY_CODES = {name: code for code, name in enumerate(POLICIES, start=1)}
"""Policy name -> its code in :class:`StepRows`; code 0 is a request that never evicts."""

_BY_CODE: tuple[Policy | None, ...] = (None, *(get_policy(name) for name in POLICIES))
_SCORES = np.array([policy is not None and policy.scores_attention for policy in _BY_CODE])
_MOVES = np.array([policy is not None and policy.moves_tokens for policy in _BY_CODE])
_LAST_QUERY_ONLY = np.array([policy is not None and policy.last_query_only for policy in _BY_CODE])
_ALL = np.iinfo(np.int32).max
_LATE_QUERIES = np.array(
    [_ALL if policy is None or policy.late_prompt_queries is None else policy.late_prompt_queries
     for policy in _BY_CODE],
    dtype=np.int32,
)  # fmt: skip
_PROMPT_QUERIES = np.array(
    [
        _ALL if policy is None or policy.scored_prompt_queries is None
        else policy.scored_prompt_queries
        for policy in _BY_CODE
    ],
    dtype=np.int32,
)  # fmt: skip
_NO_TOKENS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class StepRows:
    """One batch.

    Attributes:
        codes: policy code per row, [B], int; padding rows have 0.
        query_lens: [B], int32. seq_lens: logical lengths, this step's tokens included, [B], int32.
        prompt_tokens: [B], int32. sinks: protected first tokens, [B], int32.
    """

    codes: NDArray[Any]
    query_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    sinks: NDArray[np.int32]

    @classmethod
    def of(
        cls,
        codes: NDArray[Any],
        starts: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        prompt_tokens: NDArray[np.int32],
        sinks: NDArray[np.int32],
    ) -> StepRows:
        """From what is known of the real rows, and ``starts``, [B + 1], which may have padding rows."""
        rows = len(starts) - 1

        def padded(values: NDArray[Any]) -> NDArray[Any]:
            if len(values) == rows:
                return values
            return np.concatenate([values, np.zeros(rows - len(values), dtype=values.dtype)])

        query_lens = starts[1:] - starts[:-1]
        return cls(padded(codes), query_lens, seq_lens, padded(prompt_tokens), padded(sinks))

    @cached_property
    def computed(self) -> NDArray[np.int32]:
        """[B]: tokens of each sequence that lie before this step's."""
        return self.seq_lens - self.query_lens

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """[B]: where each row's queries start in the batch."""
        return np.cumsum(self.query_lens, dtype=np.int64) - self.query_lens

    @cached_property
    def scored_queries(self) -> NDArray[np.int32]:
        """[B]: how many of a row's queries, the last ones, have their probabilities added up.

        By position and never by chunk, so that neither the batch, nor a preemption, whose replay
        computes many generated tokens at once, has a say.
        """
        codes = self.codes
        first = np.maximum(self.prompt_tokens - _PROMPT_QUERIES[codes], 0)
        most = np.where(_LAST_QUERY_ONLY[codes], np.minimum(self.query_lens, 1), self.query_lens)
        counts: NDArray[np.int32] = np.minimum(np.maximum(self.seq_lens - first, 0), most)
        return counts * _SCORES[codes]

    @cached_property
    def crossing(self) -> NDArray[np.intp]:
        """The rows whose early queries end in this step, ascending: with it, their scores are split."""
        return np.flatnonzero(
            (self.computed < self._late_from) & (self._late_from <= self.seq_lens)
        )

    @property
    def late_queries(self) -> NDArray[np.int32]:
        """Of each row in :attr:`crossing`: how many of its queries, the last ones, are late already."""
        counts: NDArray[np.int32] = (self.seq_lens - self._late_from)[self.crossing]
        return counts

    @cached_property
    def _late_from(self) -> NDArray[np.int32]:
        """[B]: position of the first late query; 0 where all are, or nobody asks."""
        return np.maximum(self.prompt_tokens - _LATE_QUERIES[self.codes], 0)

    @cached_property
    def decodes(self) -> NDArray[np.bool_]:
        """[B]: rows with one query, which is scored: our kernel attends for them."""
        return (self.scored_queries == 1) & (self.query_lens == 1)

    @property
    def prompts(self) -> NDArray[np.bool_]:
        """[B]: rows with several queries, scored ones among them."""
        return (self.scored_queries > 0) & (self.query_lens > 1)

    @property
    def last_query_rows(self) -> NDArray[np.intp]:
        """The scored rows of a policy that counts the newest query alone, ascending."""
        return np.flatnonzero(_LAST_QUERY_ONLY[self.codes] & (self.scored_queries > 0))

    @property
    def protected_tokens(self) -> NDArray[np.int64]:
        """Positions in the batch of the first tokens that must stay."""
        rows = np.flatnonzero(_MOVES[self.codes] & (self.computed < self.sinks))
        if not rows.size:
            return _NO_TOKENS
        counts = np.minimum(self.query_lens, self.sinks - self.computed)
        return np.concatenate(
            [
                np.arange(self.starts[row], self.starts[row] + counts[row], dtype=np.int64)
                for row in rows
            ]
        )

    def new_tokens(self) -> Iterator[tuple[Policy, NDArray[np.int64] | None, NDArray[np.int64]]]:
        """The tokens of this step whose evictions will rank them, together for all rows of a policy.

        Yields:
            policy; positions in the batch, ``None`` for all of it; logical positions in their
            sequences; int64.
        """
        num_tokens = int(self.query_lens.sum())
        positions = np.arange(num_tokens) + np.repeat(self.computed - self.starts, self.query_lens)
        # Padding rows and rows without a budget have no part in it.
        tokens_of = np.bincount(self.codes, weights=self.query_lens)
        for code in np.flatnonzero(tokens_of):
            policy = _BY_CODE[code]
            if policy is None or not policy.moves_tokens:
                continue
            if tokens_of[code] == num_tokens:
                yield policy, None, positions
            else:
                tokens = np.flatnonzero(np.repeat(self.codes == code, self.query_lens))
                yield policy, tokens, positions[tokens]
