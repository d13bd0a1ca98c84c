# SPDX-License-Identifier: Apache-2.0
"""CAOTE: keep the tokens that attention's output would miss most (Goel et al., 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from h2o_vllm.policy.h2o_norm import H2ONormPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_vllm.policy.candidates import Candidates

__all__ = ["CAOTEPolicy"]

_TINY = 1e-20
"""Below any distance between two values."""


class CAOTEPolicy(H2ONormPolicy):
    """Keep the tokens with the most attention per query, weighed by how much their values matter.

    CAOTE (https://arxiv.org/abs/2504.14051): without token i attention's output o moves by
    ``a / (1 - a) * |o - v|``, where a is the token's probability and v its value; a token whose value
    is what the others give anyway can go, however much attention it has. For a stands the mean over all
    queries that could see the token (``h2o-norm``; divided by 1 - a it would hardly differ), for o the
    mean of the candidates' values (the paper's FastCAOTE).

    The distance is applied once, when a token is ranked for the first time, and relative to the mean
    distance: what later queries give to a survivor is added as it is, and stays comparable.
    """

    name: ClassVar[str] = "caote"

    def eviction_scores(self, candidates: Candidates) -> Tensor:
        """Weigh the means of the fresh tokens."""
        scores, known = super().eviction_scores(candidates), candidates.known
        if scores.shape[-1] > known:
            distances = candidates.value_distances()
            weights = distances / candidates.mean(distances).clamp_min(_TINY)
            scores[..., known:] *= weights[..., known:]
        return scores
