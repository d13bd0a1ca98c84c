# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefix cache by keys of any kind, and other places that have blocks under such keys. Engine core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from vllm.distributed.kv_events import BlockRemoved
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)

if TYPE_CHECKING:
    from h2o_vllm.blocks.manager.squeezing import EvictingManager

Block: TypeAlias = KVCacheBlock
Key: TypeAlias = BlockHashWithGroupId
Find: TypeAlias = Callable[[Key], Block | None]

MARK = b"settled:"
"""How our keys end: eight bytes, as events may have the last eight of a key alone."""


class PrefixCache:
    """The part of a pool's prefix cache that belongs to a manager's group."""

    def __init__(self, manager: EvictingManager) -> None:
        self._pool, self._group = manager.block_pool, manager.kv_cache_group_id
        self._enabled = manager.enable_caching

    def key(self, digest: bytes) -> Key:
        """The key of a block hash, by vLLM or by us."""
        return make_block_hash_with_group_id(BlockHash(digest), self._group)

    def match_run(self, keys: Iterable[Key], *elsewhere: Find) -> list[Block]:
        """The blocks of ``keys`` up to the first that neither the cache has nor ``elsewhere``."""
        found: list[Block] = []
        for key in keys:
            block = next(filter(None, (find(key) for find in (self._find, *elsewhere))), None)
            if block is None:
                break
            found.append(block)
        return found

    def match_all(self, keys: Sequence[Key], *elsewhere: Find) -> list[Block] | None:
        """All blocks of ``keys``, if any, from one place, or ``None``."""
        for find in (self._find, *elsewhere):
            blocks = [block for key in keys if (block := find(key)) is not None]
            if len(blocks) == len(keys) > 0:
                return blocks
        return None

    def publish(self, blocks: Iterable[tuple[Key, Block, int]]) -> None:
        """Publish blocks: of each its key, and the number of tokens up to its end."""
        for key, block, end in blocks:
            block.set_block_hash(key, num_tokens=end)
            self._pool.cached_block_hash_to_block.insert(key, block)

    def replace(self, blocks: Sequence[tuple[Key, Block, int]]) -> None:
        """As :meth:`publish`, in the place of what the cache has under these keys."""
        left = [block for key, _, _ in blocks if (block := self._find(key)) is not None]
        self._pool.evict_blocks({block.block_id for block in left})
        self.publish(blocks)

    def drop_events(self) -> None:
        """Take the removals of blocks under our keys out of vLLM's events: they were never announced."""
        queue = self._pool.kv_event_queue
        queue[:] = [one for one in queue if not (isinstance(one, BlockRemoved) and _is_ours(one))]

    def _find(self, key: Key) -> Block | None:
        return self._pool.cached_block_hash_to_block.get_one_block(key) if self._enabled else None


def _is_ours(removed: BlockRemoved) -> bool:
    (key,) = removed.block_hashes
    mark = maybe_convert_block_hash(BlockHash(MARK))
    return key == mark or (isinstance(key, bytes) and key.endswith(MARK))
