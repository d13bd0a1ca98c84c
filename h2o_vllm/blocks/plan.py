# SPDX-License-Identifier: Apache-2.0
"""What the engine core sends to its workers with each step. Pure data: no vLLM, no torch.

::

    position   0        1        2        3        4        5        6        7
    table     [ heavy ][ heavy ][ NULL  ][ NULL  ][ NULL  ][ recent][ recent][ tail  ]
                                 freed: back in the pool, re-used by other requests
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Eviction", "EvictionParams", "StepPlan"]


@dataclass(frozen=True)
class EvictionParams:
    """What a worker needs to know about a request that evicts.

    Attributes:
        first_scored: position of the first query whose attention is added to the scores. ``NEVER``
            (:mod:`h2o_vllm.policy.ranks`): no query's. A preemption does not change it.
        late_from: position of the first query whose attention is also kept apart from that of earlier
            queries. ``NEVER``: no query's.
        pinned: tokens in pinned blocks. They have no scores: other requests may read these blocks from the
            prefix cache.
        traced: whether the worker notes which tokens are evicted, see :mod:`h2o_vllm.engine.trace`.
        shares_heads: whether a layer's KV heads share its heavy slots, see :mod:`h2o_vllm.kernels.lanes`.
    """

    first_scored: int
    late_from: int
    traced: bool = False
    shares_heads: bool = False
    pinned: int = 0


@dataclass(frozen=True)
class Eviction:
    """One request gives back blocks before this step's forward pass.

    Attributes:
        request_id: whose blocks.
        heavy_blocks: physical ids that survive, or are new, and receive the best tokens; may be empty.
        doomed_blocks: physical ids that are freed. Read if there are heavy ones, never written: they may
            still be valid prefix-cache entries, or belong to another request from this step on.
        holes: block-table indices of ``doomed_blocks``, which now hold the null block.
        ranks: by which tokens are ranked, as indices into :data:`h2o_vllm.policy.ranks.RANKS`.
        fresh_blocks: those of the heavy and doomed blocks that no eviction has ranked before, in
            table order. Their tokens lie where they were written, all others where they were moved.
        fresh_from: logical position of the first token in ``fresh_blocks``; the others follow.
        seen: tokens computed so far, which is the number of queries so far.
        places: where segments settle, table indices of ``heavy_blocks``. These have held nothing of the
            request, so what is in them is not ranked; where no block is doomed they hold what stays of the
            segment already.
    """

    request_id: str
    heavy_blocks: tuple[int, ...]
    doomed_blocks: tuple[int, ...]
    holes: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    fresh_blocks: tuple[int, ...] = ()
    fresh_from: int = 0
    seen: int = 0
    places: tuple[int, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether tokens move, from doomed blocks into heavy ones."""
        return bool(self.heavy_blocks and self.doomed_blocks)

    @property
    def ranked_blocks(self) -> frozenset[int]:
        """Ids of the blocks whose tokens are read, and ranked, or written: none, if no tokens move."""
        return frozenset((*self.heavy_blocks, *self.doomed_blocks) if self.moves else ())

    @property
    def table_entries(self) -> dict[int, int]:
        """The block table's entries that change, by index: block ids, 0 where there is none any more."""
        return dict(zip(self.places, self.heavy_blocks, strict=False)) | dict.fromkeys(
            self.holes, 0
        )


@dataclass(frozen=True)
class StepPlan:
    """Attached to vLLM's ``SchedulerOutput`` as attribute ``h2o``.

    **The evictions of one step commute.** Workers may run them in any order, or at the same time where they
    rank no block in common. An eviction without heavy blocks reads and writes nothing. Of the others, a block
    that one of them writes (a heavy block) is in no other, neither as heavy nor as doomed:

    * When an eviction is decided, its heavy blocks have one owner and no hash, so no other table holds them.
      If another request gave back such a block earlier in this step, that request moves no tokens: if it
      moved tokens and doomed the block, the owner could not be squeezed in this step.
    * A request evicts at most once in a step, and ranks full blocks that earlier steps computed. A block that
      an earlier eviction of the step freed can become its newest block, never a heavy one.
    * If a request is preempted later in the step, its heavy blocks are freed and its eviction is cancelled.

    Where segments settle (``places``) order matters, and it is the one in which they stand here: what settles
    goes into blocks that were free, perhaps because an earlier one gave them back in this step and still
    reads them. Such an eviction is not cancelled: others may have found what it writes.

    A doomed block may be doomed by several of them: requests that need no scores, whose prompts begin alike,
    read it from the cache until each evicts for the first time. Each ranks by scores that it makes itself, so
    these take turns (:func:`.worker.waves.waves`), and what one leaves there means nothing to others.
    Candidates that are ranked by scores kept of them are in no other eviction: their owner has computed them,
    and publishes none before it has ranked it; pinned blocks, all that it reads from the cache, are none.

    Workers may run at once, or in any order, those that have no block in common.

    Attributes:
        policies: parameters of each request that evicts and is admitted or resumed in this step.
        evictions: at most one per request, in the order in which the scheduler decided them.
        confirmed: for each request that had drafts in the previous step, the number of its tokens whose KV is
            certain. The drafts after them were rejected.
    """

    policies: dict[str, EvictionParams] = field(default_factory=dict)
    evictions: tuple[Eviction, ...] = ()
    confirmed: dict[str, int] = field(default_factory=dict)
