# SPDX-License-Identifier: Apache-2.0
"""Double-entry check of vLLM's block pool: the reference count of each block equals its number of owners.

Runs in the engine core: in tests after each step, and in the corruption hunt. Reads vLLM's objects by
duck typing, so it imports no vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from h2o_vllm.errors import AccountingError


def check_pool(
    pool: Any, tables: Iterable[tuple[str, Sequence[Any]]], *, idle: bool = False
) -> None:
    """Check that the pool and the block tables agree.

    Args:
        pool: vLLM's ``BlockPool``.
        tables: (request id, its ``KVCacheBlock`` s, null blocks included) for each table of each manager
            that shares the pool.
        idle: also check that no block is in use.

    Raises:
        AccountingError: a block is leaked, is twice in one table, or has a wrong reference count.
    """
    owners: Counter[int] = Counter()
    for request_id, table in tables:
        live = [block.block_id for block in table if not block.is_null]
        if len(live) != len(set(live)):
            raise AccountingError(f"request {request_id} holds a block twice: {sorted(live)}")
        owners.update(live)
    for block in pool.blocks:
        if not block.is_null and block.ref_cnt != owners[block.block_id]:
            raise AccountingError(
                f"block {block.block_id} has reference count {block.ref_cnt} and "
                f"{owners[block.block_id]} owners"
            )
    free = pool.get_num_free_blocks()
    # The null block belongs to no request.
    if free + len(owners) != pool.num_gpu_blocks - 1:
        raise AccountingError(
            f"{free} blocks free + {len(owners)} in use != {pool.num_gpu_blocks - 1} in the pool"
        )
    if idle and owners:
        raise AccountingError(f"no request left, but blocks {sorted(owners)} are in use")


def check_private(blocks: Iterable[Any]) -> None:
    """Check that no other request can see the blocks that an eviction writes, or ranks by collected scores.

    Another request expects a block's tokens where they were written, and would add attention to their scores.

    Raises:
        AccountingError: a block is shared, or the prefix cache holds it.
    """
    for block in blocks:
        if block.ref_cnt != 1 or block.block_hash is not None:
            raise AccountingError(
                f"eviction would write or rank block {block.block_id}, which has reference count "
                f"{block.ref_cnt} and hash {block.block_hash!r}"
            )
