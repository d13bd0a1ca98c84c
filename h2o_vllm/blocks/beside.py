# SPDX-License-Identifier: Apache-2.0
"""Managers of the KV cache groups that are not evicted: windows, chunks and states. Engine core.

They share the pool with the evictable group. vLLM itself frees what leaves a window, so nothing is evicted
there. But after an eviction these layers compute KV that depends on it, through the layers below them. Other
requests must not find that KV in the prefix cache (law 7).
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
    """Publishes no block of a request after its first eviction. The first base of the managers below."""

    _has_evicted: Callable[[str], bool] | None = None

    def limit(self, has_evicted: Callable[[str], bool]) -> None:
        """Set the function that says, by a request's id, whether it has evicted."""
        self._has_evicted = has_evicted

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """As the base class until the request's first eviction; then nothing.

        Earlier steps have published what they computed. The tokens of this step come after the eviction.
        """
        assert self._has_evicted is not None, "the scheduler binds every manager"
        if not self._has_evicted(request.request_id):
            super().cache_blocks(
                request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
            )

    def published_from(self, request_id: str, computed: int) -> list[KVCacheBlock]:
        """Blocks after ``computed`` tokens that are published although this step only now fills them."""
        table = self.req_to_blocks.get(request_id, [])
        return [
            block for block in table[computed // self.block_size :] if block.block_hash is not None
        ]


class H2OSlidingWindowManager(LimitedManager, SlidingWindowManager):
    """Manages layers with a sliding window."""


class H2OChunkedManager(LimitedManager, ChunkedLocalAttentionManager):
    """Manages layers that attend within chunks."""


class H2OMambaManager(LimitedManager, MambaManager):
    """Manages layers that keep a state."""
