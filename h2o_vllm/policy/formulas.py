# SPDX-License-Identifier: Apache-2.0
"""What each rank makes of the tokens that an eviction ranks, and how ranks are joined. Worker process.

One function per rank, in plain torch. Each returns ``[L, KH, C - known]``, float32: the scores of the fresh
tokens; those of ranks that rank ``anew`` return ``[L, KH, C]``, of all candidates. None looks beyond one KV
head: workers have different ones, and must rank as one process would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from h2o_vllm.policy.candidates import head_number
from h2o_vllm.policy.policy import Policy

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_vllm.policy.candidates import Candidates

__all__ = ["FORMULAS", "merge_ranks", "new_scores", "pooled"]

POOLED = 7
"""Width of the max pooling of ``end``, the token itself in its middle. SnapKV's ``kernel_size``."""

# Law 4 does not hold without BEHIND and NEWER: of equal scores that of the lower candidate stays, and at a
# second eviction candidates lie in any order.
BEHIND = 2.0**-20
"""How much less of its size a score is by the second rank, twice that by the third, ...: tokens of one rank
by different measures do not tie. Eight times what float32 can tell apart, so sums stay apart as well."""

SINKS, MOST = 4, 2.0
"""As many first tokens have a predicted score that is higher than any attention; kvpress keeps as many."""

NEWER = 2.0**-17
"""By how much of its size a predicted score is larger per position. In the first layer a word has one key and
one value wherever it stands: of equal words the newest comes first, by less than any prediction."""

_TINY = 1e-20
"""Below any distance between two values."""


def attention(candidates: Candidates) -> Tensor:
    """H2O (https://arxiv.org/abs/2306.14048): the sum over all queries so far, never normalised."""
    return candidates.scores[..., candidates.known :]


def mean(candidates: Candidates) -> Tensor:
    """RoCo's mean (https://arxiv.org/abs/2402.06262) over the queries that could see the token.

    A token at position p has been seen by ``seen - p`` queries. Its sum is multiplied by
    ``seen / (seen - p)``: what it would be, had all queries seen it. That ranks by the mean, and leaves a
    sum, to which later queries add.
    """
    seen = candidates.seen
    # Candidates lie before the newest query: the divisor is at least 1.
    factor = seen / (seen - candidates.fresh_positions)
    return candidates.scores[..., candidates.known :] * factor


def value(candidates: Candidates) -> Tensor:
    """CAOTE (https://arxiv.org/abs/2504.14051): how far attention's output moves without the token.

    The paper's ``a / (1 - a) * |o - v|``, with :func:`mean` for the probability a (dividing by 1 - a would
    hardly change it), and for the output o the mean of the candidates' values (FastCAOTE). Distances are
    relative to their mean, so that what later queries give to a survivor stays comparable.
    """
    distances = candidates.value_distances()
    weights = distances / candidates.mean(distances).clamp_min(_TINY)
    return mean(candidates) * weights[..., candidates.known :]


def end(candidates: Candidates) -> Tensor:
    """SnapKV (https://arxiv.org/abs/2404.14469): attention of the prompt's last queries, pooled.

    Beyond the paper, which compresses prompts only: the answer's queries count as they come. Fresh tokens'
    neighbours in memory are still those in the text.
    """
    assert candidates.late is not None
    return pooled(candidates.late[..., candidates.known :])


def pooled(fresh: Tensor) -> Tensor:
    """The highest score of each token's neighbourhood, [L, KH, n]; at the ends it has one half."""
    wide = F.pad(fresh, (POOLED // 2, POOLED // 2), value=-torch.inf)
    # Of 2, 4 and 7 neighbours: three passes over the memory, where max_pool1d compares seven times.
    for step in (1, 2, POOLED - 4):
        wide = torch.maximum(wide[..., :-step], wide[..., step:])
    return wide


def key(candidates: Candidates) -> Tensor:
    """KeyDiff (https://arxiv.org/abs/2504.15364): minus the cosine of a key and the mean direction of all.

    The mean is over the candidates; the recent tokens, which always stay, are left out.
    """
    return -candidates.key_similarity()


def predicted(candidates: Candidates) -> Tensor:
    """KVzap (https://arxiv.org/abs/2601.07891): the attention that repeating the prompt would give.

    Predicted from the token's own keys and values (:mod:`h2o_vllm.calibration`). The first four tokens,
    attention's sinks, come first: what attends to them does not show in their KV.
    """
    assert candidates.predicted is not None
    positions = candidates.fresh_positions
    given = candidates.predicted().masked_fill(positions < SINKS, MOST)
    return given * torch.exp(positions * NEWER)


def random(candidates: Candidates) -> Tensor:
    """Random Attention (https://arxiv.org/abs/2609.03430): a draw per layer, KV head, token and eviction.

    Uniform in [0, 1), in steps of 2^-24. A hash of numbers that belong to the request alone: the tokens seen
    at the eviction, the layer, the KV head and the token's place among the candidates. So a request draws the
    same in any batch, and again after a preemption.
    """
    layers, heads, count = candidates.scores.shape
    device = candidates.scores.device
    layer = torch.arange(layers, device=device)[:, None] * head_number(1, 0)
    head = torch.arange(heads, device=device) + candidates.first_head
    seeds = _mixed(_mixed(layer + head) ^ candidates.seen)
    draws = _mixed((seeds[..., None] + torch.arange(count, device=device) * _GOLDEN) & _MASK)
    return (draws >> 8).to(torch.float32) * 2.0**-24


_MASK, _GOLDEN = 2**32 - 1, 0x9E3779B9


def _mixed(bits: Tensor) -> Tensor:
    """MurmurHash3's finaliser of 32 bits, in int64."""
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _MASK
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _MASK
    return bits ^ (bits >> 16)


FORMULAS: dict[str, Callable[[Candidates], Tensor]] = {
    formula.__name__: formula for formula in (predicted, attention, mean, value, end, key, random)
}
"""By the rank's name."""


def new_scores(ranks: Sequence[int], candidates: Candidates) -> Tensor | None:
    """New scores of the tokens that an eviction is about to rank; they stay with the survivors.

    Args:
        ranks: indices of the policy's ranks, see :meth:`.Policy.indices`.

    Returns:
        ``[L, KH, C]``, float32, or ``None``: they stay as they are.
    """
    policy = Policy.of(ranks)
    formulas = [FORMULAS[rank.name] for rank in policy.ranks]
    if len(formulas) == 1 and policy.ranks[0].anew:
        return formulas[0](candidates)
    fresh = candidates.scores.shape[-1] - candidates.known
    if not (fresh and policy.adjusts):
        return None
    scores = [formula(candidates)[..., -fresh:] for formula in formulas]
    return candidates.with_fresh((candidates.merge or merge_ranks)(*scores))


def merge_ranks(first: Tensor, *others: Tensor) -> Tensor:
    """The score, in the unit of ``first``, that stands at the best of each token's ranks; [..., n] each.

    Of token t it is the largest of ``first[t]`` and, for each other measure, of the score that ``first``
    gives to the token whose rank t has by that measure. So later attention can add to it, and scores of
    different evictions compare.

    Two tokens that have one rank by different measures would tie. So a score by the second measure is less by
    :data:`BEHIND` of its size, by the third by twice that, ...
    """
    if not others:
        return first
    in_order, best = first.sort(dim=-1, descending=True).values, first
    for place, other in enumerate(others, 1):
        order = other.sort(dim=-1, descending=True, stable=True).indices
        given = in_order * (1 - place * BEHIND)
        best = torch.maximum(best, torch.empty_like(first).scatter_(-1, order, given))
    return best
