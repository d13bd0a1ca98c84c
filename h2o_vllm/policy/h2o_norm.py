# SPDX-License-Identifier: Apache-2.0
"""H2O's score per query that could see the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from h2o_vllm.policy.h2o import H2OPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_vllm.policy.candidates import Candidates

__all__ = ["H2ONormPolicy"]


class H2ONormPolicy(H2OPolicy):
    """Keep the tokens with the highest attention per query that could see them.

    H2O (https://arxiv.org/abs/2306.14048) adds up attention, so a token from the beginning of a long
    prompt wins by the number of its queries. The mean instead of the sum is the score of RoCo (Ren
    and Zhu, https://arxiv.org/abs/2402.06262).

    A token at position p has been seen by ``seen - p`` queries when it is ranked for the first time.
    Its score is then multiplied by ``seen / (seen - p)``: what it would be, had the token been there
    from the start. That ranks by the mean, and leaves a sum: a survivor is seen by every later
    query, so sums of survivors and of newcomers, each adjusted once, stay comparable.
    """

    name: ClassVar[str] = "h2o-norm"
    scores_at_eviction: ClassVar[bool] = True

    def eviction_scores(self, candidates: Candidates) -> Tensor:
        """Extrapolate the sums of the fresh tokens to all queries so far."""
        seen = candidates.seen
        # Candidates lie before the newest query: the divisor is at least 1.
        factor = seen / (seen - candidates.fresh_positions)
        return candidates.with_fresh(candidates.scores[..., candidates.known :] * factor)
