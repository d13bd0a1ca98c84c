# SPDX-License-Identifier: Apache-2.0
"""Zap: predicted attention to a token when the prompt is repeated (Jegou et al., KVzap, arXiv 2601.07891)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from h2o_vllm.policy.h2o import H2OPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_vllm.policy.candidates import Candidates

__all__ = ["MOST", "NEWER", "SINKS", "ZapPolicy", "foretold"]

SINKS, MOST = 4, 2.0
"""As many first tokens get a score that is higher than any attention; kvpress keeps as many for KVzip."""

NEWER = 2.0**-17
"""By how much of its size a score is larger per position. In the first layer one word has one key and one
value wherever it stands: of equals the newest comes first, by more than rounding and less than anything that
was foretold, 6 % in 8,192 tokens."""


class ZapPolicy(H2OPolicy):
    """Keep the tokens that the model would attend to if it repeated the prompt.

    KVzip (https://arxiv.org/abs/2505.23416) has the model do so, and scores a token by the largest attention
    it gets. KVzap (https://arxiv.org/abs/2601.07891) predicts that attention. Ours does so from the token's
    own key and value (:mod:`h2o_vllm.calibration`), when it is ranked for the first time; later evictions
    know what it was.

    The first four tokens, attention's sinks, come first: what they are looked at for is not in their KV. They
    count as heavy ones, unlike ``kv_sinks``.

    Nothing is collected between evictions, attention stays with vLLM's own kernel, the prompt is read once,
    and its end need not be known. It wants a calibration of the model, minutes once.
    """

    name: ClassVar[str] = "zap"
    scores_attention: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = False
    scores_at_eviction: ClassVar[bool] = True

    def eviction_scores(self, candidates: Candidates) -> Tensor | None:
        """Those of the fresh tokens."""
        if candidates.scores.shape[-1] == candidates.known:
            return None
        return candidates.with_fresh(foretold(candidates))


def foretold(candidates: Candidates) -> Tensor:
    """What fresh tokens are expected to get, [L, KH, C - known]: sinks first, and of equals the newest."""
    assert candidates.foretold is not None
    positions = candidates.fresh_positions
    told = candidates.foretold()
    scores = told.masked_fill(positions < SINKS, MOST)
    return scores * torch.exp(positions * NEWER)
