# SPDX-License-Identifier: Apache-2.0
"""First scores of newly written slots, in all layers and heads at once."""

from __future__ import annotations

from torch import Tensor

from h2o_vllm.kernels import reference_paged

__all__ = ["reset_scores"]


def reset_scores(scores: Tensor, slots: Tensor, values: Tensor | None = None) -> None:
    """Give newly written slots their first score. Eager, one launch.

    Args:
        scores: [L, N, KH, BS], float32, contiguous.
        slots: [n], int64, ``block_id * BS + offset``; negative ones (vLLM's padding) are skipped. No slot
            twice.
        values: [L, KH, n], float32, contiguous; zero if left out.
    """
    reference_paged.reset_scores(scores, slots, values)
