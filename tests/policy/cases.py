# SPDX-License-Identifier: Apache-2.0
"""Fresh tokens of one eviction, with random keys and values or with given ones; sets of ranks."""

from itertools import combinations

import torch

from h2o_vllm.policy.formulas import MEASURES, first_scores
from h2o_vllm.policy.fresh import Centre, Fresh, Tokens
from h2o_vllm.policy.policy import Policy, joinable_ranks

_RANKS = joinable_ranks(calibrated=True)
JOINS = [
    "+".join(ranks) for count in range(1, len(_RANKS) + 1) for ranks in combinations(_RANKS, count)
]
"""Every set of ranks that may be joined, by name."""


def scored(policy: str, fresh: Fresh) -> torch.Tensor:
    """First scores of ``fresh``, [L, KH, n]."""
    return first_scores(Policy.parse(policy, calibrated=True), fresh)[:, 0]


def fresh_of(
    scores: torch.Tensor, fresh_from: int, seen: int, size: int = 8, seed: int = 0
) -> Fresh:
    """Of [L, KH, n], with random keys and values, the same for the same ``seed``."""
    layers, heads, count = scores.shape
    gen = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, layers, heads, count, size, generator=gen)
    late, predicted = torch.rand(2, layers, 1, heads, count, generator=gen)
    return Fresh(
        scores[:, None],
        positions=torch.arange(fresh_from, fresh_from + count).float()[None, None],
        seen=torch.full((1, 1, 1), float(seen)),
        late=late,
        measures={"predicted": predicted, **measures_of(keys, values)},
    )


def centre_of(keys: torch.Tensor, values: torch.Tensor) -> Centre:
    """Of tokens, [L, KH, n, D]."""
    layers, heads, count, size = keys.shape
    centre, tokens = Centre.begin(layers, heads, size, keys.device), tokens_of(keys, values)
    centre.add(tokens, MEASURES)
    centre.complete(count)
    centre.add_distances(centre.distances(tokens))
    return centre


def tokens_of(keys: torch.Tensor, values: torch.Tensor) -> Tokens:
    """Of [L, KH, n, D] each, as one block."""
    return Tokens(lambda: (keys[:, None], values[:, None]))


def measures_of(
    keys: torch.Tensor, values: torch.Tensor, centre: Centre | None = None
) -> dict[str, torch.Tensor]:
    """What formulas want to know of keys and values, [L, KH, n, D] each.

    Args:
        centre: of these tokens if ``None``.
    """
    tokens, centre = tokens_of(keys, values), centre or centre_of(keys, values)
    found = {name: measure(tokens, centre) for name, measure in MEASURES.items()}
    return {**found, "deviation": centre.deviation(found["deviation"])}
