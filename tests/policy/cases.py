# SPDX-License-Identifier: Apache-2.0
"""Candidates of an eviction, with random keys and values or with given ones; sets of ranks."""

from collections.abc import Callable
from functools import partial
from itertools import combinations

import torch

from h2o_vllm.kernels import reference
from h2o_vllm.policy.candidates import Candidates
from h2o_vllm.policy.formulas import new_scores
from h2o_vllm.policy.policy import Policy, joinable_ranks

__all__ = ["JOINS", "candidates_of", "measures_of", "scored"]

_RANKS = joinable_ranks(calibrated=True)
JOINS = [
    "+".join(ranks) for count in range(1, len(_RANKS) + 1) for ranks in combinations(_RANKS, count)
]
"""Every set of ranks that may be joined, by name."""


def scored(policy: str, candidates: Candidates) -> torch.Tensor:
    """New scores of ``candidates``; the old ones where an eviction changes none."""
    new = new_scores(Policy.parse(policy, calibrated=True).indices(), candidates)
    return candidates.scores if new is None else new


def candidates_of(
    scores: torch.Tensor, known: int, fresh_from: int, seen: int, size: int = 8, seed: int = 0
) -> Candidates:
    """With random keys and values, the same for the same ``seed``."""
    layers, heads, count = scores.shape
    gen = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, layers, heads, count, size, generator=gen)
    late, predicted = torch.rand(2, layers, heads, count, generator=gen)
    measures = measures_of(keys, values)
    return Candidates(
        scores, known, fresh_from, seen, *measures, late, predicted=lambda: predicted[..., known:]
    )


def measures_of(
    keys: torch.Tensor, values: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Of [L, KH, C, D] each."""
    return partial(reference.key_similarity, keys), partial(reference.value_distances, values)
