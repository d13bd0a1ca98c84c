# SPDX-License-Identifier: Apache-2.0
"""The KV cache groups beside ours, windows, chunks and states, in the same pool. Engine core.

vLLM frees what leaves a window by itself, so nothing is evicted there. But what these layers compute behind
an eviction depends on it, through the layers below them: other requests must not find it (law 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

__all__ = [
    "H2OChunkedManager",
    "H2OMambaManager",
    "H2OSlidingWindowManager",
    "LimitedManager",
]


class LimitedManager(SingleTypeKVCacheManager):
    """Publishes nothing of a request from its first eviction on. The first base of the managers below."""

    _has_evicted: Callable[[str], bool] | None = None

    def limit(self, has_evicted: Callable[[str], bool]) -> None:
        """Bind the manager that evicts: whether a request has given back blocks, by its id."""
        self._has_evicted = has_evicted

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """As the base class, before the first eviction.

        What earlier steps computed has been published then. This step's tokens come behind the eviction.
        """
        assert self._has_evicted is not None, "the scheduler binds every manager"
        if not self._has_evicted(request.request_id):
            super().cache_blocks(
                request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
            )

    def published_from(self, request_id: str, computed: int) -> list[KVCacheBlock]:
        """Blocks that can be found although this step fills them, behind ``computed`` tokens."""
        table = self.req_to_blocks.get(request_id, [])
        return [
            block for block in table[computed // self.block_size :] if block.block_hash is not None
        ]


class H2OSlidingWindowManager(LimitedManager, SlidingWindowManager):
    """Of layers with a sliding window."""


class H2OChunkedManager(LimitedManager, ChunkedLocalAttentionManager):
    """Of layers that attend within chunks."""


class H2OMambaManager(LimitedManager, MambaManager):
    """Of layers that keep a state."""
