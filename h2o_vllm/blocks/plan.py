# SPDX-License-Identifier: Apache-2.0
"""What the engine core tells its workers about one step. Pure data: no vLLM, no torch.

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
    """What a worker has to know of a request that evicts.

    Attributes:
        first_scored: position of the first query whose attention is added to the scores; ``NEVER``
            (:mod:`h2o_vllm.policy.ranks`): none. The same after a preemption.
        late_from: position of the first query whose attention is also kept apart from the earlier ones';
            ``NEVER``: it is not.
        pinned: tokens in pinned blocks, which others may read from the prefix cache: without scores.
        traced: whether the worker notes which tokens go, see :mod:`h2o_vllm.engine.trace`.
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
        heavy_blocks: physical ids that survive and receive the best tokens; may be empty.
        doomed_blocks: physical ids that are freed. Read if there are heavy ones, never written: they may
            still be valid prefix-cache entries, or belong to another request from this step on.
        holes: block-table indices of ``doomed_blocks``, which now hold the null block.
        ranks: by which tokens are ranked, as indices into :data:`h2o_vllm.policy.ranks.RANKS`.
        fresh_blocks: those of the heavy and doomed blocks that no eviction has ranked before, in
            table order. Their tokens lie where they were written, all others where they were moved.
        fresh_from: logical position of the first token in ``fresh_blocks``; the others follow.
        seen: tokens computed so far, which is the number of queries so far.
    """

    request_id: str
    heavy_blocks: tuple[int, ...]
    doomed_blocks: tuple[int, ...]
    holes: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    fresh_blocks: tuple[int, ...] = ()
    fresh_from: int = 0
    seen: int = 0

    @property
    def ranked_blocks(self) -> frozenset[int]:
        """Ids of the blocks whose tokens are read, and ranked: none, if there is no heavy one."""
        return frozenset((*self.heavy_blocks, *self.doomed_blocks) if self.heavy_blocks else ())


@dataclass(frozen=True)
class StepPlan:
    """Attached to vLLM's ``SchedulerOutput`` as attribute ``h2o``.

    Law of the evictions of one step: **they commute**. One without heavy blocks reads and writes nothing. A
    block that one of the others writes (heavy) is in no other one of them, neither as heavy nor as doomed:

    * a heavy block has one owner and no hash when its eviction is decided, so no other table holds it; who
      shared it until this step, and gave it back, is a request that moves no tokens: one that does, and
      dooms it in this step, keeps the owner from being squeezed;
    * a request evicts at most once in a step, and ranks full blocks whose tokens earlier steps computed: what
      an earlier eviction freed can become its newest block, never a heavy one of the same step;
    * an eviction whose request is preempted later in the step, which frees its heavy blocks, is cancelled.

    A doomed block may be doomed by several of them: requests that need no scores, whose prompts begin alike,
    read it from the cache until each evicts for the first time. Each ranks by scores that it makes itself, so
    these take turns (:func:`.worker.waves.waves`), and what one leaves there means nothing to others.
    Candidates that are ranked by scores kept of them are in no other eviction: their owner has computed them,
    and publishes none before it has ranked it; pinned blocks, all that it reads from the cache, are none.

    Workers may run them in any order, or at once where they rank no block in common.

    Attributes:
        policies: what workers must know of each request that evicts and is admitted or resumed in this step.
        evictions: one per request at most, in the order in which the scheduler decided them.
        confirmed: of the requests that had drafts in the step before, how many of their tokens' KV is certain
            by now. The drafts behind them were rejected.
    """

    policies: dict[str, EvictionParams] = field(default_factory=dict)
    evictions: tuple[Eviction, ...] = ()
    confirmed: dict[str, int] = field(default_factory=dict)
