# SPDX-License-Identifier: Apache-2.0
"""KeyDiff: keep distinctive keys, without looking at attention (Park et al., NeurIPS 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from h2o_vllm.policy.h2o import H2OPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_vllm.policy.candidates import Candidates

__all__ = ["KeyDiffPolicy"]


class KeyDiffPolicy(H2OPolicy):
    """Keep the tokens whose keys are least like the others.

    KeyDiff (https://arxiv.org/abs/2504.15364) observes that keys that differ from the rest receive the
    most attention, and ranks by minus the cosine of a key and the mean of the normalised keys. Nothing
    is collected between evictions: attention stays with vLLM's own kernel. The mean is over the
    candidates; the recent tokens, which always stay, are left out.
    """

    name: ClassVar[str] = "keydiff"
    scores_attention: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = False
    scores_at_eviction: ClassVar[bool] = True

    def eviction_scores(self, candidates: Candidates) -> Tensor:
        """All candidates anew, from their keys."""
        return -candidates.key_likeness()
