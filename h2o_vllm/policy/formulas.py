# SPDX-License-Identifier: Apache-2.0
"""What each rank says of tokens that are ranked for the first time, and how ranks are joined. Worker process.

One function per rank, in plain torch, the same on CPUs and GPUs. Each takes n tokens each of some evictions,
and returns their scores, ``[L, E, KH, n]``, float32. None looks beyond one KV head: workers have different
ones, and must rank as one process would.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_vllm.policy.fresh import Centre, Fresh, Tokens, head_number
from h2o_vllm.policy.policy import Policy

Order = Callable[[Tensor], Tensor]

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
one value wherever it stands: of equal words the newest comes first, by less than any prediction. A rank by
values alone needs it as well: by ``deviation`` alone equal words tie."""


def attention(fresh: Fresh) -> Tensor:
    """H2O (https://arxiv.org/abs/2306.14048): the sum over all queries so far, never normalised."""
    return fresh.scores


def mean(fresh: Fresh) -> Tensor:
    """RoCo's mean (https://arxiv.org/abs/2402.06262) over the queries that could see the token.

    A token at position p has been seen by ``seen - p`` queries. Its sum is multiplied by
    ``seen / (seen - p)``: what it would be, had all queries seen it. That ranks by the mean, and leaves a
    sum, to which later queries add.
    """
    # What is ranked lies before the newest query: the divisor is at least 1.
    return fresh.scores * (fresh.seen / (fresh.seen - fresh.positions))


def value(fresh: Fresh) -> Tensor:
    """CAOTE (https://arxiv.org/abs/2504.14051): how far attention's output moves without the token.

    The paper's ``a / (1 - a) * |o - v|``, with :func:`mean` for the probability a (dividing by 1 - a would
    hardly change it), and for the output o the mean of the values that the first eviction ranked (FastCAOTE).
    Distances are relative to their mean, so that what later queries give to a survivor stays comparable.
    """
    return mean(fresh) * fresh.measures["deviation"]


def end(fresh: Fresh) -> Tensor:
    """SnapKV (https://arxiv.org/abs/2404.14469): attention of the prompt's last queries, pooled.

    Beyond the paper, which compresses prompts only: the answer's queries count as they come.
    """
    return pooled(fresh.late)


def pooled(fresh: Tensor) -> Tensor:
    """The highest score of each token's neighbourhood, [L, KH, n]; at the ends it has one half."""
    wide = F.pad(fresh, (POOLED // 2, POOLED // 2), value=-torch.inf)
    # Of 2, 4 and 7 neighbours: three passes over the memory, where max_pool1d compares seven times.
    for step in (1, 2, POOLED - 4):
        wide = torch.maximum(wide[..., :-step], wide[..., step:])
    return wide


def key(fresh: Fresh) -> Tensor:
    """KeyDiff (https://arxiv.org/abs/2504.15364): minus the cosine of a key and the mean direction.

    The mean is over the keys that the first eviction ranked; the paper takes it over all keys, at each one.
    """
    return -fresh.measures["similarity"]


def predicted(fresh: Fresh) -> Tensor:
    """KVzap (https://arxiv.org/abs/2601.07891): the attention that repeating the prompt would give.

    Predicted from the token's own keys and values (:mod:`h2o_vllm.calibration`). The first four tokens,
    attention's sinks, come first: what attends to them does not show in their KV.
    """
    given = torch.where(fresh.positions < SINKS, MOST, fresh.measures["predicted"])
    return given * torch.exp(fresh.positions * NEWER)


FORMULAS: dict[str, Callable[[Fresh], Tensor]] = {
    formula.__name__: formula for formula in (predicted, attention, mean, value, end, key)
}
"""By the rank's name: of those that give a token one score, when it is first ranked."""

MEASURES: dict[str, Callable[[Tokens, Centre], Tensor]] = {
    "similarity": lambda tokens, centre: centre.similarity(tokens),
    "deviation": lambda tokens, centre: centre.distances(tokens),
}
"""What ranks need of a token's key or value, [L, m, KH, BS] of m blocks, compared with the centre of their
request. ``deviation`` is then divided by its mean over the first eviction. One more is ``predicted``: the
attention that a token is expected to get, above 0, by the model's calibration."""


def order(scores: Tensor) -> Tensor:
    """Indices of scores, [..., n], best first; NaN comes first, equal ones keep their order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def first_scores(policy: Policy, fresh: Fresh, order: Order = order) -> Tensor:
    """The scores by which tokens are ranked first, [L, E, KH, n]; later attention adds to a survivor's.

    Args:
        order: what :func:`order` says, where a device sorts faster than torch.
    """
    return merge_ranks(*(FORMULAS[rank.name](fresh) for rank in policy.ranks), order=order)


def merge_ranks(first: Tensor, *others: Tensor, order: Order = order) -> Tensor:
    """The score, in the unit of ``first``, that stands at the best of each token's ranks; [..., n] each.

    Of token t it is the largest of ``first[t]`` and, for each other measure, of the score that ``first``
    gives to the token whose rank t has by that measure. So later attention can add to it, and scores of
    different evictions compare.

    Two tokens that have one rank by different measures would tie. So a score by the second measure is less by
    :data:`BEHIND` of its size, by the third by twice that, ...
    """
    if not others:
        return first
    in_order, best = first.gather(-1, order(first)), first
    for place, other in enumerate(others, 1):
        given = in_order * (1 - place * BEHIND)
        best = torch.maximum(best, torch.empty_like(first).scatter_(-1, order(other), given))
    return best


def draws(
    shape: tuple[int, int, int], seen: int, first_head: int, device: torch.device | str
) -> Tensor:
    """Random Attention (https://arxiv.org/abs/2609.03430): a draw per layer, KV head, token and eviction.

    Uniform in [0, 1), in steps of 2^-24. A hash of numbers that belong to the request alone: the tokens seen
    at the eviction, the layer, the KV head and the token's place among the candidates. So a request draws the
    same in any batch, and again after a preemption.

    Args:
        shape: [L, KH, C], of all tokens that the eviction ranks, also those that were ranked before.
        first_head: number of the first head of the first of these layers, see :func:`.head_number`.
    """
    layers, heads, count = shape
    layer = torch.arange(layers, device=device)[:, None] * head_number(1, 0)
    head = torch.arange(heads, device=device) + first_head
    seeds = _mixed(_mixed(layer + head) ^ seen)
    drawn = _mixed((seeds[..., None] + torch.arange(count, device=device) * _GOLDEN) & _MASK)
    return (drawn >> 8).to(torch.float32) * 2.0**-24


_MASK, _GOLDEN = 2**32 - 1, 0x9E3779B9


def _mixed(bits: Tensor) -> Tensor:
    """MurmurHash3's finaliser of 32 bits, in int64."""
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _MASK
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _MASK
    return bits ^ (bits >> 16)
