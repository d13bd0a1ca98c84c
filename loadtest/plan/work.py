# SPDX-License-Identifier: Apache-2.0
"""What one step of an engine computes, in the counts that its time depends on.

Read off the real scheduler, right behind its decision, in simulations and calibrations alike. Engine core.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

__all__ = ["FEATURES", "Work", "work_of"]


@dataclass
class Work:
    """Counts of one step.

    A *pair* is a query and a key that it attends to. *Scored*: of requests that may evict, whose attention
    keeps scores; the others are served by vLLM's own kernels.

    Attributes:
        prompt_tokens: computed in prompts, those of preempted requests that are computed again included.
        decodes: requests that get a further token each.
        pairs, scored_pairs: of the prompts.
        context, scored_context: of the decodes, which is the KV they read, in tokens.
        ranked: tokens that the evictions before this step chose among.
        outputs: rows of logits; decodes, and prompts that end.
    """

    prompt_tokens: int = 0
    decodes: int = 0
    pairs: int = 0
    scored_pairs: int = 0
    context: int = 0
    scored_context: int = 0
    ranked: int = 0
    outputs: int = 0

    @property
    def tokens(self) -> int:
        """All that run through the layers."""
        return self.prompt_tokens + self.decodes

    def values(self) -> tuple[int, ...]:
        """In the order of :data:`FEATURES`."""
        return astuple(self)


FEATURES = tuple(field.name for field in fields(Work))


def work_of(scheduler: Any, output: Any) -> Work:
    """What ``output`` of ``scheduler.schedule()`` asks of the model; call it before anything else happens."""
    # None is vLLM's own.
    blocks: Any = getattr(scheduler, "blocks", None)
    work = Work()
    for request_id, count in output.num_scheduled_tokens.items():
        request = scheduler.requests[request_id]
        # The scheduler has already counted this step's tokens as computed.
        before = request.num_computed_tokens - count
        state: Any = None if blocks is None else blocks.eviction_state(request_id)
        evicts = state is not None and state.evicts
        if evicts:
            before -= state.holes * blocks.block_size
        pairs = count * before + count * (count + 1) // 2
        if count > 1:
            work.prompt_tokens += count
            work.scored_pairs += pairs * evicts
            work.pairs += pairs * (not evicts)
        else:
            work.decodes += 1
            work.scored_context += pairs * evicts
            work.context += pairs * (not evicts)
        work.outputs += not request.is_prefill_chunk
    plan = getattr(output, "h2o", None)
    if plan is not None:
        for eviction in plan.evictions:
            ranked = len(eviction.heavy_blocks) + len(eviction.doomed_blocks)
            work.ranked += ranked * blocks.block_size
    return work
