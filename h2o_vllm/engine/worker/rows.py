# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch, from counts alone: which evict, which queries are scored, which tokens are new.

Worker process, any device. Numpy on the host: no vLLM, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_vllm.errors import AccountingError
from h2o_vllm.policy.ranks import NEVER

_NO_TOKENS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class StepRows:
    """One batch.

    Attributes:
        evicts: rows of requests that can evict, [B]; padding rows cannot.
        query_lens: [B], int32. seq_lens: logical lengths, this step's tokens included, [B], int32.
        first_scored: see :class:`h2o_vllm.blocks.plan.EvictionParams`; [B], int32.
    """

    evicts: NDArray[np.bool_]
    query_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    first_scored: NDArray[np.int32]

    @classmethod
    def of(
        cls,
        evicts: NDArray[np.bool_],
        starts: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        first_scored: NDArray[np.int32],
    ) -> StepRows:
        """From what is known of the real rows, and ``starts``, [B + 1], which may have padding rows."""
        rows = len(starts) - 1

        def padded(values: NDArray[Any], empty: int) -> NDArray[Any]:
            missing = rows - len(values)
            return np.pad(values, (0, missing), constant_values=empty) if missing else values

        return cls(
            padded(evicts, 0),
            starts[1:] - starts[:-1],
            seq_lens,
            padded(first_scored, NEVER),
        )

    @cached_property
    def computed(self) -> NDArray[np.int32]:
        """[B]: tokens of each sequence that lie before this step's."""
        return self.seq_lens - self.query_lens

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """[B]: where each row's queries start in the batch."""
        return np.cumsum(self.query_lens, dtype=np.int64) - self.query_lens

    @cached_property
    def scored(self) -> NDArray[np.bool_]:
        """[B]: rows whose queries have their probabilities added up: all of a row's, or none.

        By position and never by chunk, so that neither the batch, nor a preemption, whose replay
        computes many generated tokens at once, has a say: chunks end before the first scored query.

        Raises:
            AccountingError: one does not.
        """
        scored = (self.seq_lens > self.first_scored) & (self.query_lens > 0)
        if (scored & (self.computed < self.first_scored)).any():
            raise AccountingError("a chunk of a prompt has queries that are scored, and others")
        return scored

    @cached_property
    def decodes(self) -> NDArray[np.bool_]:
        """[B]: rows with one query, which is scored: our kernel attends for them."""
        return self.scored & (self.query_lens == 1)

    @property
    def prompts(self) -> NDArray[np.bool_]:
        """[B]: rows with several queries, which are scored."""
        return self.scored & (self.query_lens > 1)

    def new_tokens(self) -> NDArray[np.int64] | slice:
        """Positions in the batch of the tokens whose attention will be collected."""
        chosen = self.first_scored < NEVER
        if not chosen.any():
            return _NO_TOKENS
        if (chosen | (self.query_lens == 0)).all():
            # All of the batch: nothing has to be copied to the device.
            return slice(int(self.query_lens.sum()))
        return np.flatnonzero(np.repeat(chosen, self.query_lens))
