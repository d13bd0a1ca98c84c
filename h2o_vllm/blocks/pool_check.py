# SPDX-License-Identifier: Apache-2.0
"""Double-entry check of vLLM's block pool: every block has the owners it says it has.

Runs in the engine core: in tests after every step, and whenever an operator asks. Reads vLLM's
objects by duck typing, so it needs no import of vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from h2o_vllm.errors import AccountingError

__all__ = ["check_pool", "check_private"]


def check_pool(
    pool: Any, tables: Iterable[tuple[str, Sequence[Any]]], *, idle: bool = False
) -> None:
    """Check that pool and block tables tell the same story.

    Args:
        pool: vLLM's ``BlockPool``.
        tables: request ids and their ``KVCacheBlock`` s, null blocks included; every table of every
            manager that shares the pool.
        idle: also check that no block is in use.

    Raises:
        AccountingError: a block is leaked, owned twice by one request, or miscounted.
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
                f"block {block.block_id} counts {block.ref_cnt} owners and has "
                f"{owners[block.block_id]}"
            )
    free = pool.get_num_free_blocks()
    # One block is the null block and belongs to nobody.
    if free + len(owners) != pool.num_gpu_blocks - 1:
        raise AccountingError(
            f"{free} blocks free + {len(owners)} in use != {pool.num_gpu_blocks - 1} in the pool"
        )
    if idle and owners:
        raise AccountingError(f"no request left, but blocks {sorted(owners)} are in use")


def check_private(blocks: Iterable[Any]) -> None:
    """Check that nobody else can see blocks that an eviction writes, or ranks by scores kept of their tokens.

    Whoever sees a block wants its tokens where they were written, and adds attention to their scores.

    Raises:
        AccountingError: a block is shared, or reachable through the prefix cache.
    """
    for block in blocks:
        if block.ref_cnt != 1 or block.block_hash is not None:
            raise AccountingError(
                f"eviction would write or rank block {block.block_id}, which has {block.ref_cnt} owners "
                f"and hash {block.block_hash!r}"
            )
