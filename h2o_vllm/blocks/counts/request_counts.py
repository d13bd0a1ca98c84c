# SPDX-License-Identifier: Apache-2.0
"""The counts of a request that eviction decisions depend on. Engine core and API server; imports nothing."""

from __future__ import annotations

from typing import Protocol


class RequestCounts(Protocol):
    """The part of ``vllm.v1.request.Request`` that eviction states and their manager need."""

    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int
    priority: int
    arrival_time: float

    @property
    def num_tokens(self) -> int:
        """Prompt plus generated tokens."""

    def is_finished(self) -> bool:
        """Whether the request has left the engine."""
