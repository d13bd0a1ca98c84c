# SPDX-License-Identifier: Apache-2.0
"""Managers of the KV cache groups that are not evicted: windows, chunks and states. Engine core.

They share the pool with the evictable group. vLLM itself frees what leaves a window, so nothing is evicted
there. But after an eviction these layers compute KV that depends on it, through the layers below them. Other
requests must not find that KV in the prefix cache (law 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from h2o_vllm.blocks.counts.request_state import RequestState


def published_from(
    manager: SingleTypeKVCacheManager, request_id: str, computed: int
) -> list[KVCacheBlock]:
    """Blocks after ``computed`` tokens that are published although this step only now fills them."""
    table = manager.req_to_blocks.get(request_id, [])
    unfilled = table[computed // manager.block_size :]
    return [block for block in unfilled if block.block_hash is not None]


def withdraw_unfilled(manager: SingleTypeKVCacheManager, request_id: str, computed: int) -> None:
    """Remove from the prefix cache the blocks that a preempted request has published and not computed.

    vLLM 0.32 publishes the blocks that a step will fill. With priority scheduling it may preempt a request
    that it has already scheduled in the same step.
    """
    unfilled = published_from(manager, request_id, computed)
    manager.block_pool.evict_blocks({block.block_id for block in unfilled})


class LimitedManager(SingleTypeKVCacheManager):
    """Publishes no block of a request after its first eviction. The first base of the managers below."""

    _states: Mapping[str, RequestState] | None = None

    def limit(self, states: Mapping[str, RequestState]) -> None:
        """Set the states of all requests, by their ids. The evictable group's manager keeps them."""
        self._states = states

    def cache_blocks(self, request: Request, num_tokens: int, *how: Any, **options: Any) -> None:
        """As the base class until the request's first eviction; then nothing.

        Earlier steps have published what they computed. The tokens of this step come after the eviction.
        """
        state = self._state(request.request_id)
        if state is None or not state.holes:
            super().cache_blocks(request, num_tokens, *how, **options)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As the base class; a preempted request first withdraws what it has not computed."""
        state = self._state(request_id)
        if state is not None and not state.counts.is_finished():
            withdraw_unfilled(self, request_id, state.counts.num_computed_tokens)
        return super().pop_blocks_for_free(request_id)

    def _state(self, request_id: str) -> RequestState | None:
        assert self._states is not None, "the scheduler binds every manager"
        return self._states.get(request_id)


class H2OSlidingWindowManager(LimitedManager, SlidingWindowManager):
    """Manages layers with a sliding window."""


class H2OChunkedManager(LimitedManager, ChunkedLocalAttentionManager):
    """Manages layers that attend within chunks."""


class H2OMambaManager(LimitedManager, MambaManager):
    """Manages layers that keep a state."""
