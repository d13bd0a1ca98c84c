# SPDX-License-Identifier: Apache-2.0
"""Loads of a connector that may still fail, and what their requests give back meanwhile. Engine core.

Workers say at the end of a step whether its loads came. With asynchronous scheduling the next step is
decided before that, and may evict from a request that loads. If the blocks that it gives back went to another
request, vLLM would find the lost ones in that request's table, and end it. So they are held until the step
has come back, and what was loaded is published no earlier. Reads vLLM's objects by duck typing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["UnconfirmedLoads"]


class UnconfirmedLoads:
    """The requests whose loads have not come back, each with the blocks held for it.

    Args:
        pool: vLLM's ``BlockPool``.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: dict[str, list[Any]] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def expect(self, request_id: str) -> None:
        """Note that the request loads if it is admitted. Call it before its blocks are taken."""
        self._held.setdefault(request_id, [])

    def confirm(self, request_id: str) -> None:
        """Note that the step with the load has come back, or never came: frees what was held."""
        self._pool.free_blocks(self._held.pop(request_id, ()))

    def free(self, request_id: str, blocks: Sequence[Any]) -> None:
        """Free blocks of a request, first ones first, or hold them until its load has come back."""
        if request_id in self._held:
            self._held[request_id] += blocks
        else:
            self._pool.free_blocks(blocks)

    def tables(self) -> Iterable[tuple[str, Sequence[Any]]]:
        """The held blocks, as tables for :func:`.check_pool`."""
        return ((f"{name}, while it loads", blocks) for name, blocks in self._held.items())
