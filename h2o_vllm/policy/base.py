# SPDX-License-Identifier: Apache-2.0
"""The contract of a policy: which of a request's blocks die, and what ranks their tokens.

A policy answers in two processes. The engine core asks :meth:`Policy.split` which live blocks
become heavy and which are doomed, from counts alone. The worker asks

* whether attention is added to the scores (:attr:`Policy.scores_attention`), and whose: that of all
  queries, of the prompt's last ones (:attr:`Policy.scored_prompt_queries`), of the newest one alone
  (:attr:`Policy.last_query_only`); and whether that of the later ones is also known apart
  (:attr:`Policy.late_prompt_queries`);
* what score a new token starts with (:meth:`Policy.initial_scores`);
* what an eviction makes of the scores first (:meth:`Policy.eviction_scores`).

It then keeps the highest-ranked tokens per layer and KV head. Plain Python and torch, no vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_vllm.policy.candidates import Candidates

__all__ = ["BlockSplit", "Policy"]


class BlockSplit(NamedTuple):
    """Table indices of one eviction, both ascending. They never overlap.

    ``heavy`` blocks survive and receive the best tokens of both lists; an empty ``heavy`` means
    that nothing is copied. ``doomed`` blocks are freed.
    """

    heavy: tuple[int, ...]
    doomed: tuple[int, ...]


class Policy(ABC):
    """What to keep. Stateless: one instance serves every request."""

    name: ClassVar[str]
    """Value of ``kv_policy``."""

    scores_attention: ClassVar[bool]
    """Whether attention probabilities are added to the scores of this policy's requests."""

    moves_tokens: ClassVar[bool]
    """Whether an eviction writes into surviving blocks. If so, these must not be shared: beside the protected
    tokens' blocks the request publishes only what its first eviction frees, and reads that at most."""

    needs_scores: ClassVar[bool] = True
    """Whether a token's score is kept from the moment its KV is written: what such scores rank is neither
    read from the cache, nor published before that. If not, nothing has to be known of a token before an
    eviction ranks it, and its KV may come from the cache: :meth:`eviction_scores` has to make the fresh
    tokens' scores out of keys and values, whatever it finds there."""

    scored_prompt_queries: ClassVar[int | None] = None
    """How many of the prompt's last queries are scored; ``None`` for all. Counted in positions, so that
    it does not matter how the prompt is cut into chunks. Generated tokens' queries are always scored."""

    late_prompt_queries: ClassVar[int | None] = None
    """With how many of the prompt's last queries those begin whose attention :attr:`.Candidates.late` tells
    apart from the scores; ``None``: nobody asks. Counted in positions."""

    last_query_only: ClassVar[bool] = False
    """Whether only the newest query counts: the scores of all live tokens fall to zero before it."""

    scores_at_eviction: ClassVar[bool] = False
    """Whether :meth:`eviction_scores` has anything to say."""

    @abstractmethod
    def split(
        self, candidates: list[int], num_doomed: int, *, first: bool, protected: int = 0
    ) -> BlockSplit:
        """Divide the live blocks that lie before the recent window.

        Args:
            candidates: table indices, ascending; all blocks are full.
            num_doomed: how many to free, in ``1..len(candidates)``.
            first: whether this is the request's first eviction.
            protected: how many table indices, from 0, hold first tokens that must stay. A policy that
                moves tokens may ignore it: there, these tokens rank above all others.
        """

    def initial_scores(
        self, positions: Tensor, num_layers: int, num_kv_heads: int, first_kv_head: int
    ) -> Tensor | None:
        """Scores that new tokens start with; ``None`` means zero.

        Args:
            positions: logical positions of the new tokens, [T], int64.
            num_layers: evictable layers on this worker.
            num_kv_heads: KV heads on this worker.
            first_kv_head: global index of this worker's first KV head, so that tensor-parallel
                ranks together rank as one would.

        Returns:
            ``[num_layers, num_kv_heads, T]``, float32, or ``None``.
        """
        del positions, num_layers, num_kv_heads, first_kv_head
        return None

    def eviction_scores(self, candidates: Candidates) -> Tensor | None:
        """New scores of the tokens that an eviction is about to rank; they stay with the survivors.

        Asked only if :attr:`scores_at_eviction`. May not look beyond one KV head: tensor-parallel ranks have
        different ones, and must rank as one would.

        Returns:
            ``[L, KH, C]``, float32, or ``None`` to leave them as they are.
        """
        del candidates
        return None
