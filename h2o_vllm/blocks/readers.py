# SPDX-License-Identifier: Apache-2.0
"""Who reads a prompt in its owner's blocks in order to repeat it: see :mod:`.repetition`. Engine core."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = ["Readers"]


class BlockTables(Protocol):
    """The part of vLLM's ``SingleTypeKVCacheManager`` that readers need."""

    block_size: int
    block_pool: Any
    req_to_blocks: Any
    num_cached_block: dict[str, int]


class _Loan(NamedTuple):
    owner: str
    blocks: int


class Readers:
    """The readers of one manager's requests: their tables begin with blocks of others.

    A block counts each of them as an owner, so that whoever ends first takes nothing from the other.
    """

    def __init__(self, manager: BlockTables) -> None:
        self._manager = manager
        self._loans: dict[str, _Loan] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loans

    def owner_of(self, request_id: str) -> str:
        """Whose blocks a reader reads; of all others, their own."""
        loan = self._loans.get(request_id)
        return request_id if loan is None else loan.owner

    def lend(self, owner: str, reader: str, tokens: int) -> None:
        """Let ``reader``, which has nothing yet, begin behind the first ``tokens``, whole blocks, of another.

        In the same blocks, which are freed when both have given them back.
        """
        manager = self._manager
        blocks = manager.req_to_blocks[owner][: tokens // manager.block_size]
        assert not any(block.is_null for block in blocks)
        assert reader not in manager.req_to_blocks
        manager.block_pool.touch(blocks)
        manager.req_to_blocks[reader] = list(blocks)
        # As if they had come from the prefix cache: known to the manager, and not to be hashed.
        manager.num_cached_block[reader] = len(blocks)
        self._loans[reader] = _Loan(owner, len(blocks))

    def own_blocks(self, owner: str) -> int:
        """Blocks that readers of ``owner`` hold beside its own."""
        tables = self._manager.req_to_blocks
        return sum(
            len(tables[reader]) - loan.blocks
            for reader, loan in self._loans.items()
            if loan.owner == owner
        )

    def leave(self, request_id: str) -> None:
        """A reader gives everything back; nothing happens for anybody else."""
        self._loans.pop(request_id, None)
