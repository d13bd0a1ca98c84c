# SPDX-License-Identifier: Apache-2.0
"""Settled segments, and the blocks computed after them, in vLLM's prefix cache. Engine core.

A key joins vLLM's block hash and the lineage. The hash covers all tokens so far, salt, adapter and media. The
lineage covers all else that KV depends on (law 7)::

    blocks     pinned    settled segment 1, 2 ...         whole, first settling not yet due    whole, after it
    key        vLLM's    hash at its end + lineage + n    vLLM's                               hash + lineage

``n`` numbers the blocks that stay of a segment. So a request finds these blocks if it has the same first
tokens and the same lineage as the request that computed them, and only then.

vLLM's KV cache events tell nothing of these keys: who reads them names a block by its tokens alone.

The next turn may repeat the prompt and leave out the answer, or what was thought in it. It needs segments as
they were at the prompt's end: those that have settled since must be there whole. So while a request runs, the
whole blocks of these segments are held, until blocks are short.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from h2o_vllm.blocks.counts.settling_state import SettlingState
from h2o_vllm.blocks.manager.prefix_cache import MARK, Block, Find, Key, PrefixCache
from h2o_vllm.blocks.manager.retained_answers import RetainedAnswers
from h2o_vllm.blocks.plan import Eviction

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from h2o_vllm.blocks.manager.squeezing import EvictingManager

MOST_MOVED = 2048
"""Blocks that are moved in a step so that they are lost last: 1 ms."""


class SettledBlocks:
    """Settles segments in the tables of a manager, publishes them, and looks them up."""

    def __init__(self, manager: EvictingManager) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._size = manager.block_size
        self.cache = PrefixCache(manager)
        self.states: dict[str, SettlingState] = {}
        """The requests whose segments settle, from their arrival to their end."""
        self._held: dict[str, list[Block]] = {}
        self._computing: list[SettlingState] = []
        """Requests in the midst of their prompts that may be waited for."""
        self.answers = RetainedAnswers()

    def track(self, request_id: str, state: SettlingState) -> None:
        """Note a new request. It may be the next turn of one that has just ended."""
        self.states[request_id] = state
        if self.answers.any_retained and not state.counts.skip_reading_prefix_cache:
            hit, tokens = self.lookup(state, state.prompt_tokens - 1)
            # What a template puts behind a prompt, such as a begun thought, may not come again.
            self.answers.on_request(request_id, hit, tokens + 2 * self._size)

    def begin_step(self, running: Iterable[str]) -> None:
        """Note which of the ``running`` requests compute prompts in this step."""
        names = [*running]
        states = [self.states[one] for one in names if one in self.states]
        self._computing = [
            state
            for state in states
            if state.counts.num_computed_tokens < state.prompt_tokens
            and not state.counts.skip_reading_prefix_cache
        ]
        kept = self.answers.begin_step(len(states), idle=not names)
        if len(kept) <= MOST_MOVED:
            # Free blocks are taken in the order in which they were freed, and others are freed all the time.
            self._pool.touch(kept)
            self._pool.free_blocks(reversed(kept))

    def should_defer(self, request_id: str) -> bool:
        """Whether a request has to wait: for a next turn, or for KV that another request computes.

        If the answer is no, requests that are asked about later in this step may wait for this one.
        """
        state = self.states.get(request_id)
        if state is None:
            return False

        def blocks_left() -> int:
            takes = -(-state.peak_tokens(state.counts.num_tokens) // self._size)
            takes += self._manager.reserved_blocks(request_id)
            if not state.counts.skip_reading_prefix_cache:
                found, _ = self.lookup(state, state.counts.num_tokens - 1)
                takes -= sum(block.ref_cnt > 0 and not block.is_null for block in found)
            return self._pool.get_num_free_blocks() + self.held_blocks - takes

        # One that was preempted came before all others.
        preempted = state.peak_blocks > 0
        if not preempted and self.answers.should_defer(request_id, blocks_left):
            return True
        return self._computed_by_another(state)

    def resume(self, request_id: str, computed: int) -> None:
        """Note that a request begins behind a hit of ``computed`` tokens, if its segments settle."""
        if request_id in self.states:
            self.states[request_id].resume(computed)

    def end(self, request_id: str) -> None:
        """Forget a request that has ended. Its blocks are freed in a moment."""
        state = self.states.pop(request_id, None)
        if state is not None:
            table = self._manager.req_to_blocks.get(request_id, ())
            held = self._held.get(request_id, ())
            self.answers.on_finish(request_id, state.prompt_tokens, table, held)

    def _computed_by_another(self, state: SettlingState) -> bool:
        """Whether a request that waits has to compute the block that a running one computes in the next step.

        Chunks of a prompt end where segments settle, and a running request does not look into the cache
        again. So two requests that begin at once would compute all later chunks twice. If one waits, a
        document is computed once for all that ask.
        """
        if not self._manager.enable_caching or state.counts.skip_reading_prefix_cache:
            return False
        hashes = state.counts.block_hashes
        for other in self._computing:
            # What it computes in this step is in the cache already.
            index = self._manager.num_cached_block.get(other.counts.request_id, 0)
            known = other.counts.block_hashes
            # A block's hash covers all tokens up to its end.
            shared = index < min(len(known), len(hashes)) and known[index] == hashes[index]
            if shared and other.lineage == state.lineage:
                return True
        self._computing.append(state)
        return False

    def lookup(self, state: SettlingState, most: int, *elsewhere: Find) -> tuple[list[Block], int]:
        """Look up the blocks of at most the first ``most`` tokens, also ``elsewhere``.

        A hit never ends where a segment is due: it ends before that point, or includes the settled segment.

        Returns:
            The blocks, null blocks included, and the number of tokens that they stand for.
        """
        schedule, size = state.schedule, self._size
        limit, pinned = most // size, schedule.pin // size
        found = self.cache.match_run(self._raw_keys(state, 0, min(pinned, limit)), *elsewhere)
        if len(found) < pinned:
            return found, len(found) * size
        segments: list[list[Block]] = []
        for number in range(1, schedule.settled(limit * size) + 1):
            segment = self.cache.match_all(self._segment_keys(state, number), *elsewhere)
            if segment is None:
                break
            segments.append(segment)
        holes = [self._pool.null_block] * schedule.given_back
        for settled in range(len(segments), -1, -1):
            first = schedule.end(settled) // size
            stop = min(limit, schedule.due(settled + 1) // size - 1)
            run = self.cache.match_run(self._raw_keys(state, first, stop), *elsewhere)
            reached = (first + len(run)) * size
            if not settled or reached >= schedule.due(settled):
                for segment in segments[:settled]:
                    found += [*segment, *holes]
                return found + run, reached
        raise AssertionError("without a settled segment any number of blocks is a hit")

    def settle(self, request_id: str, state: SettlingState, number: int) -> Eviction | None:
        """Settle a segment that is due.

        If another request has settled the same segment, the request takes those blocks. Otherwise the best
        tokens go into new blocks, and other requests may find these from now on. No request reads them before
        the forward pass of this step, and workers compact before it.

        Returns:
            What workers have to do; ``None``: too few blocks are free, and nothing has changed.
        """
        schedule, pool = state.schedule, self._pool
        first, kept = schedule.end(number - 1) // self._size, schedule.kept
        span = slice(first, first + schedule.segment // self._size)
        table = self._manager.req_to_blocks[request_id]
        raw = table[span]
        doomed: tuple[int, ...] = ()
        # Blocks of two settlings are not joined: where scores are equal, they may keep different tokens.
        keys = self._segment_keys(state, number)
        into = self.cache.match_all(keys)
        if into is not None:
            pool.touch(into)
        elif pool.get_num_free_blocks() < kept:
            return None
        else:
            doomed = _ids(raw)
            # Taken before the segment's own blocks are freed: a block that is read must not be written.
            into = pool.get_new_blocks(kept)
            end = schedule.end(number)
            # Without a prefix cache there are no keys.
            self.cache.replace([(key, block, end) for key, block in zip(keys, into, strict=False)])
        table[span] = [*into, *[pool.null_block] * schedule.given_back]
        if self._manager.enable_caching and schedule.due(number) > state.prompt_tokens:
            in_prompt = max(0, state.prompt_tokens // self._size - first)
            self._held.setdefault(request_id, []).extend(raw[:in_prompt])
            raw = raw[in_prompt:]
        pool.free_blocks(reversed(raw))
        state.resume(schedule.due(number))
        return Eviction(
            request_id=request_id,
            heavy_blocks=_ids(into),
            doomed_blocks=doomed,
            holes=tuple(range(first + kept, span.stop)),
            ranks=state.policy.indices(),
            fresh_blocks=doomed,
            fresh_from=schedule.end(number - 1),
            seen=schedule.due(number),
            places=tuple(range(first, first + kept)),
        )

    def release_held(self, request_id: str) -> None:
        """Free what is held for a request."""
        self._pool.free_blocks(reversed(self._held.pop(request_id, [])))

    def make_room(self, needed: int) -> bool:
        """If so many blocks can be freed, free what has been held longest until ``needed`` are free.

        Returns:
            Whether any was freed.
        """
        free = self._pool.get_num_free_blocks
        if not self._held or not free() < needed <= free() + self.held_blocks:
            return False
        while self._held and free() < needed:
            self.release_held(next(iter(self._held)))
        return True

    def held(self) -> Iterable[tuple[str, list[Block]]]:
        """Each request for which blocks are held, and the blocks."""
        return self._held.items()

    @property
    def held_blocks(self) -> int:
        """How many blocks would be free if none was held: requests may share some of these."""
        return sum(block.ref_cnt == 1 for held in self._held.values() for block in held)

    def publish(self, request_id: str, computed: int) -> None:
        """Publish the full blocks that were computed after the first segment settled, if any settles."""
        state = self.states.get(request_id)
        if state is None:
            return
        cached = self._manager.num_cached_block
        begin = max(cached.get(request_id, 0), state.schedule.stock_until // self._size)
        table, end = self._manager.req_to_blocks[request_id], computed // self._size
        keys = self._raw_keys(state, begin, end)
        self.cache.publish(
            (key, table[index], (index + 1) * self._size) for index, key in enumerate(keys, begin)
        )
        if begin < end:
            cached[request_id] = end

    def published(self, request_id: str) -> list[list[Block]]:
        """The blocks of a request, and those held for it, that others find; those of a segment together."""
        table, state = self._manager.req_to_blocks.get(request_id, []), self.states.get(request_id)
        first, stop, groups = 0, 0, []
        if state is not None:
            schedule = state.schedule
            first, step = schedule.pin // self._size, schedule.segment // self._size
            stop = first + state.settled * step
            groups = [table[at : at + schedule.kept] for at in range(first, stop, step)]
        others = (*table[:first], *table[stop:], *self._held.get(request_id, ()))
        groups += [[block] for block in others]
        return [group for group in groups if all(block.block_hash for block in group)]

    def _segment_keys(self, state: SettlingState, number: int) -> list[Key]:
        if not self._manager.enable_caching:
            return []
        end = state.counts.block_hashes[state.schedule.end(number) // self._size - 1]
        return [self._key(end, state, b"s%d" % place) for place in range(state.schedule.kept)]

    def _raw_keys(self, state: SettlingState, first: int, stop: int) -> Iterator[Key]:
        for index in range(first, stop):
            plain = state.counts.block_hashes[index]
            stock = (index + 1) * self._size <= state.schedule.stock_until
            yield self.cache.key(plain) if stock else self._key(plain, state, b"r")

    def _key(self, plain: bytes, state: SettlingState, kind: bytes) -> Key:
        return self.cache.key(hashlib.sha256(plain + state.lineage + kind).digest() + MARK)


def _ids(blocks: Iterable[Any]) -> tuple[int, ...]:
    return tuple(block.block_id for block in blocks)
