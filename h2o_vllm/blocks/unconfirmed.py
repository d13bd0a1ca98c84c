# SPDX-License-Identifier: Apache-2.0
"""What evictions give back while a connector may still need it to be left alone. Engine core.

**Loads that may fail.** Workers say at the end of a step whether its loads came. With asynchronous scheduling
the next step is decided before that, and may evict from a request that loads. If the blocks that it gives
back went to another request, vLLM would find the lost ones in that request's table, and end it. So they are
held until the step has come back, and what was loaded is published no earlier.

**Loads that wait for nothing.** A peer's KV may arrive in a block as soon as the block is taken, while a step
in flight still attends to it, and before the eviction that gave it back has moved its tokens. vLLM holds the
blocks of requests that end or are preempted (``Scheduler.deferred_frees``) until the last step that uses them
has come back; what evictions give back waits in the same queue.

Reads vLLM's objects by duck typing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence, Sequence
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
        self._deferred: MutableSequence[tuple[int, list[Any]]] = []
        self._step: Callable[[], int] | None = None

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def defer(
        self, deferred: MutableSequence[tuple[int, list[Any]]], step: Callable[[], int] | None
    ) -> None:
        """Note vLLM's queue of deferred frees: the number of a step, and blocks, first ones first.

        Args:
            step: the number of the step that is being decided; ``None``: loads wait for the evictions of
                their step, so these free at once.
        """
        self._deferred, self._step = deferred, step

    def expect(self, request_id: str) -> None:
        """Note that the request loads if it is admitted. Call it before its blocks are taken."""
        self._held.setdefault(request_id, [])

    def confirm(self, request_id: str) -> None:
        """Note that the step with the load has come back, or never came: frees what was held."""
        self._pool.free_blocks(self._held.pop(request_id, ()))

    def free(self, request_id: str, blocks: Sequence[Any]) -> None:
        """Free blocks of a request, those first that are to be taken first, or hold them for now."""
        if request_id in self._held:
            self._held[request_id] += blocks
        elif self._step is not None:
            # vLLM frees the last ones first.
            self._deferred.append((self._step(), [*reversed(blocks)]))
        else:
            self._pool.free_blocks(blocks)

    def tables(self) -> Iterable[tuple[str, Sequence[Any]]]:
        """The held blocks, as tables for :func:`.check_pool`."""
        yield from ((f"{name}, while it loads", blocks) for name, blocks in self._held.items())
        yield from ((f"step {step}, until it is done", blocks) for step, blocks in self._deferred)
