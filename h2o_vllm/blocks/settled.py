# SPDX-License-Identifier: Apache-2.0
"""What has settled, and what was computed behind it, in vLLM's prefix cache. Engine core.

Keys are made of vLLM's block hashes, which cover all tokens so far, salt, adapter and media, and of the
lineage, which covers the rest that KV depends on (law 7)::

    pinned     segment 1, of K blocks       segment 2        whole, up to the first settling    and behind it
    vLLM's     hash at its end + lineage    the same         vLLM's                             hash + lineage

So requests that begin alike and settle alike find what one of them has computed; nobody else does.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from h2o_vllm.blocks.plan import Eviction
from h2o_vllm.blocks.settling_state import SettlingState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

__all__ = ["SettledBlocks"]


class SettledBlocks:
    """Settles segments, publishes them, and finds them again, in the tables of a manager."""

    def __init__(self, manager: SingleTypeKVCacheManager) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._size = manager.block_size

    def find(self, state: SettlingState, most: int) -> tuple[list[KVCacheBlock], int]:
        """The blocks of at most ``most`` first tokens, null blocks among them, and how many tokens these are.

        A hit never ends where a segment is still to settle: a request settles before a step of its own.
        """
        schedule, size = state.schedule, self._size
        limit, pinned = most // size, schedule.pin // size
        found = self._run(state, 0, min(pinned, limit))
        if len(found) < pinned:
            return found, len(found) * size
        segments: list[list[KVCacheBlock]] = []
        for number in range(1, schedule.settled(limit * size) + 1):
            if (segment := self._segment(state, number)) is None:
                break
            segments.append(segment)
        holes = [self._pool.null_block] * schedule.given_back
        for settled in range(len(segments), -1, -1):
            first = schedule.end(settled) // size
            run = self._run(state, first, min(limit, schedule.due(settled + 1) // size - 1))
            reached = (first + len(run)) * size
            if not settled or reached >= schedule.due(settled):
                for segment in segments[:settled]:
                    found += [*segment, *holes]
                return found + run, reached
        raise AssertionError("without a settled segment any number of blocks is a hit")

    def settle(self, request_id: str, state: SettlingState, number: int) -> Eviction | None:
        """Let a segment settle that is due; ``None``: too few blocks are free.

        What others have made of it is taken. Else its best tokens go into blocks that nobody holds, which
        others may find from now on: who does needs them in this step or later, and workers compact before the
        forward pass.
        """
        schedule, pool = state.schedule, self._pool
        first, kept = schedule.end(number - 1) // self._size, schedule.kept
        span = slice(first, first + schedule.segment // self._size)
        table = self._manager.req_to_blocks[request_id]
        raw = table[span]
        into = self._segment(state, number)
        if into is not None:
            pool.touch(into)
        elif pool.get_num_free_blocks() < kept:
            return None
        found = into is not None
        if into is None:
            # Before anything is freed: what is read must not be written.
            into = pool.get_new_blocks(kept)
            self._publish_segment(state, number, into)
        table[span] = [*into, *[pool.null_block] * schedule.given_back]
        pool.free_blocks(reversed(raw))
        state.resume(schedule.due(number))
        doomed = () if found else _ids(raw)
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

    def publish(self, request_id: str, state: SettlingState, computed: int) -> None:
        """Publish full blocks that were computed behind the first settled segment."""
        cached = self._manager.num_cached_block
        begin = max(cached.get(request_id, 0), state.schedule.stock_until // self._size)
        table, end = self._manager.req_to_blocks[request_id], computed // self._size
        for index in range(begin, end):
            self._insert(self._raw_key(state, index), table[index], index)
        if begin < end:
            cached[request_id] = end

    def _run(self, state: SettlingState, first: int, stop: int) -> list[KVCacheBlock]:
        """Whole blocks from ``first`` on that can be found, before ``stop``."""
        found: list[KVCacheBlock] = []
        for index in range(first, stop):
            block = self._look_up(self._raw_key(state, index))
            if block is None:
                break
            found.append(block)
        return found

    def _segment(self, state: SettlingState, number: int) -> list[KVCacheBlock] | None:
        """All blocks of a settled segment, or nothing: those of two settlings do not belong together."""
        if not self._manager.enable_caching:
            return None
        blocks = [self._look_up(key) for key in self._segment_keys(state, number)]
        whole = [block for block in blocks if block is not None]
        return whole if len(whole) == len(blocks) else None

    def _publish_segment(self, state: SettlingState, number: int, into: list[KVCacheBlock]) -> None:
        if not self._manager.enable_caching:
            return
        keys = self._segment_keys(state, number)
        # Of equal scores another token may have stayed there.
        left = [block for block in map(self._look_up, keys) if block is not None]
        self._pool.evict_blocks({block.block_id for block in left})
        for key, block in zip(keys, into, strict=True):
            self._insert(key, block, state.schedule.end(number) // self._size - 1)

    def _segment_keys(self, state: SettlingState, number: int) -> list[BlockHash]:
        end = state.counts.block_hashes[state.schedule.end(number) // self._size - 1]
        return [_key(end, state.lineage, b"s%d" % place) for place in range(state.schedule.kept)]

    def _raw_key(self, state: SettlingState, index: int) -> BlockHash:
        plain = state.counts.block_hashes[index]
        if (index + 1) * self._size <= state.schedule.stock_until:
            return BlockHash(plain)
        return _key(plain, state.lineage, b"r")

    def _look_up(self, key: BlockHash) -> KVCacheBlock | None:
        blocks = self._pool.get_cached_block(key, [self._manager.kv_cache_group_id])
        return blocks[0] if blocks else None

    def _insert(self, key: BlockHash, block: KVCacheBlock, index: int) -> None:
        full_key = make_block_hash_with_group_id(key, self._manager.kv_cache_group_id)
        block.set_block_hash(full_key, num_tokens=(index + 1) * self._size)
        self._pool.cached_block_hash_to_block.insert(full_key, block)


def _key(plain: bytes, lineage: bytes, kind: bytes) -> BlockHash:
    return BlockHash(hashlib.sha256(plain + lineage + kind).digest())


def _ids(blocks: Iterable[Any]) -> tuple[int, ...]:
    return tuple(block.block_id for block in blocks)
