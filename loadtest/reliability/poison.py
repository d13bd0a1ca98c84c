# SPDX-License-Identifier: Apache-2.0
"""Poison for an in-process engine: a read of a block that is not the request's own shows at once.

Hung onto the objects of one running engine; production code knows nothing of it. Each step, after the
compaction and before the forward pass::

    owned blocks, and free ones the prefix cache can still find    left alone: their KV is valid
    free blocks that no request can find, and the null block (the holes)    NaN: nothing may read them
    blocks handed out in this step                                 1e4, scores 1e30: not written yet
    those of them into which a segment has settled                 left alone; they were NaN before it, or old

A block handed out is read beyond its live length by vLLM's kernels, which mask what they read: there a
NaN would survive (0 * NaN), a large number does not. The doomed blocks of this step are read by the
compaction, hence poisoned after it, although the pool has counted them as free since the step was planned.
"""

import math
from typing import Any

UNWRITTEN_KV = 1e4
UNWRITTEN_SCORE = 1e30
"""Larger than any sum of probabilities: a score that was not reset wins every ranking."""


class Poison:
    """Poisons the blocks of an engine whose scheduler and worker live in this process.

    Attributes:
        count: blocks filled so far.
    """

    def __init__(self, scheduler: Any, worker: Any) -> None:
        self._pool = scheduler.kv_cache_manager.block_pool
        self._state = worker._state
        self._handed_out: list[int] = []
        self._dead: set[int] = set()
        self.count = 0
        self._watch_pool()
        self._watch_steps(worker.model_runner)
        self._fill([self._pool.null_block.block_id], math.nan, math.nan)

    def _watch_pool(self) -> None:
        get_new_blocks = self._pool.get_new_blocks

        def watched(num_blocks: int) -> Any:
            blocks = get_new_blocks(num_blocks)
            self._handed_out.extend(block.block_id for block in blocks)
            return blocks

        self._pool.get_new_blocks = watched

    def _watch_steps(self, runner: Any) -> None:
        execute_model = runner.execute_model

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_forward(scheduler_output)
            return execute_model(scheduler_output, *args, **kwargs)

        runner.execute_model = watched

    def _before_forward(self, scheduler_output: Any) -> None:
        fresh, self._handed_out = self._handed_out, []
        evictions = scheduler_output.h2o.evictions
        settled = {b for eviction in evictions if eviction.places for b in eviction.heavy_blocks}
        written = {b for eviction in evictions for b in eviction.heavy_blocks} - settled
        assert written.isdisjoint(fresh), "an eviction wrote a block before it had any tokens"
        self._dead.difference_update(fresh)
        self._fill([b for b in fresh if b not in settled], UNWRITTEN_KV, UNWRITTEN_SCORE)
        free = {
            block.block_id
            for block in self._pool.blocks
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null
        }
        self._fill(sorted(free - self._dead), math.nan, UNWRITTEN_SCORE)
        self._dead |= free

    def _fill(self, blocks: list[int], kv: float, score: float) -> None:
        if not blocks:
            return
        for kv_cache in self._state.kv_caches:
            kv_cache[blocks] = kv
        self._state.scores[:, blocks] = score
        self.count += len(blocks)
