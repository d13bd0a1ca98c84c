# SPDX-License-Identifier: Apache-2.0
"""What the engine core sends to its workers with each step. Pure data: no vLLM, no torch.

::

    position   0        1        2        3        4        5        6        7
    table     [ NULL  ][ NULL  ][ NULL  ][ heavy ][ heavy ][ recent][ recent][ tail  ]
               freed: back in the pool, re-used by other requests
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EvictionParams:
    """Parameters of a request that evicts.

    Attributes:
        first_scored: position of the first query whose attention is added to the scores. ``NEVER``
            (:mod:`h2o_vllm.policy.ranks`): no query's. A preemption does not change it.
        pinned: tokens in pinned blocks. They have no scores: other requests may read these blocks from the
            prefix cache.
        traced: whether the worker notes which tokens are evicted, see :mod:`h2o_vllm.engine.trace`.
        shares_heads: whether a layer's KV heads share its heavy slots, see :mod:`h2o_vllm.kernels.lanes`.
        holes: null blocks in the block table with which it starts: of segments that others have settled.
    """

    first_scored: int
    traced: bool = False
    shares_heads: bool = False
    pinned: int = 0
    holes: int = 0


@dataclass(frozen=True)
class DraftView:
    """How much of its KV the drafts of a request attend to that keeps all of it.

    Attributes:
        prompt_tokens: of the request. share: of its tokens. tokens: a number of tokens instead, or ``None``.
    """

    prompt_tokens: int
    share: float
    tokens: int | None


@dataclass(frozen=True)
class Eviction:
    """One request gives back blocks before this step's forward pass.

    Attributes:
        request_id: the request that owns the blocks.
        heavy_blocks: ids of the blocks that receive the best tokens; may be empty. They survive, or are new
            ones if a segment settles.
        doomed_blocks: ids of the blocks that are freed. They are read if there are heavy blocks, and never
            written: they may still be valid prefix-cache entries, or belong to another request from this step
            on.
        holes: block-table indices that become null: those of ``doomed_blocks``. For a settled segment: its
            entries without a kept block.
        ranks: the ranks of the policy, as indices into :data:`h2o_vllm.policy.ranks.RANKS`.
        fresh_blocks: the heavy and doomed blocks that no earlier eviction has ranked, in table order. Their
            tokens lie where they were written; the tokens of all other blocks lie where they were moved.
        fresh_from: logical position of the first token in ``fresh_blocks``. The others follow it, with one
            gap at most.
        fresh_gap: how many of ``fresh_blocks`` lie before the gap, and the blocks in it: the protected end of
            the prompt.
        seen: tokens computed so far, which equals the number of queries so far.
        places: table indices of ``heavy_blocks`` if a segment settles, else empty. These blocks hold none of
            the candidates, so their content is not ranked. If no block is doomed, they already hold the
            tokens that stay: another request has ranked the same segment.
        pinned: tokens in pinned blocks, and in the prompt's protected end if it lies before the heavy blocks.
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
    fresh_gap: tuple[int, int] = (0, 0)
    pinned: int = 0

    @property
    def moves(self) -> bool:
        """Whether tokens move from doomed blocks into heavy ones."""
        return bool(self.heavy_blocks and self.doomed_blocks)

    def fresh_starts(self, block_size: int) -> tuple[int, ...]:
        """Logical position of the first token of each of ``fresh_blocks``."""
        before, gap = self.fresh_gap
        places = (at + gap * (at >= before) for at in range(len(self.fresh_blocks)))
        return tuple(self.fresh_from + place * block_size for place in places)

    @property
    def ranked_blocks(self) -> frozenset[int]:
        """Ids of the blocks whose tokens are read and ranked, or written: none if no tokens move."""
        return frozenset((*self.heavy_blocks, *self.doomed_blocks) if self.moves else ())

    @property
    def table_entries(self) -> dict[int, int]:
        """The block table's entries that change: index -> block id, 0 for the null block."""
        return dict(zip(self.places, self.heavy_blocks, strict=False)) | dict.fromkeys(
            self.holes, 0
        )


@dataclass(frozen=True)
class StepPlan:
    """Attached to vLLM's ``SchedulerOutput`` as attribute ``h2o``.

    **The evictions of one step commute if no segment settles.** Workers may run them in any order. Of those
    that move tokens, a heavy block of one is in no other, neither as heavy nor as doomed:

    * When an eviction is decided, its heavy blocks have one owner and no hash. A request that gave such a
      block back earlier in this step moves no tokens: otherwise the owner could not be squeezed in this step.
    * A request evicts at most once in a step, and ranks full blocks that earlier steps computed.
    * If a request is preempted later in the step, its eviction is cancelled.

    If segments settle (``places``), workers keep the order of ``evictions`` among those that have a block in
    common: a segment settles into free blocks, which an earlier eviction of this step may have freed and
    still reads. It is not cancelled, as other requests may have found the blocks that it writes.

    Several evictions may doom the same block, if their policies collect no attention: each computes the
    scores that it ranks by, so they take turns (:func:`.worker.state.waves`). A block that is ranked by
    collected scores is in one eviction only: its owner has computed it, and publishes it with that eviction
    or never.

    Attributes:
        policies: parameters of each request that evicts and is admitted or resumed in this step.
        evictions: at most one per request, in the order in which the scheduler decided them.
        early_blocks: ids of the blocks that no eviction has ranked, of requests whose late queries begin in
            this step (:meth:`.Policy.late_from`): the scores of their tokens so far are the early parts.
        confirmed: for each request that had drafts in the previous step, the number of its tokens whose KV is
            certain. The drafts after them were rejected.
        views: of each request that drafts on a part of its KV, and is admitted or resumed in this step.
    """

    policies: dict[str, EvictionParams] = field(default_factory=dict)
    evictions: tuple[Eviction, ...] = ()
    confirmed: dict[str, int] = field(default_factory=dict)
    views: dict[str, DraftView] = field(default_factory=dict)
    early_blocks: tuple[int, ...] = ()
