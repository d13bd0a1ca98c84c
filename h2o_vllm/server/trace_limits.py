# SPDX-License-Identifier: Apache-2.0
"""Which requests may be traced, and how many at a time. API-server process; imports no vLLM.

A trace is of one sequence, on two routes. :mod:`h2o_vllm.server.admission` checks its length;
:class:`~h2o_vllm.config.options.H2OConfig` says whether a server traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h2o_vllm.server.protocol import RefusalError

FIELD = "kv_trace"

PATHS = ("/v1/chat/completions", "/v1/completions")

MAX_TRACES = 4
"""Concurrent traced requests per API server. Each takes some megabytes for large models."""


class TraceSlots:
    """The traced requests of this process."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, path: str, request: Mapping[str, Any]) -> None:
        """Begin a traced request; :meth:`give_back` ends it.

        Raises:
            RefusalError: it may not be traced, or too many others are (a 429).
        """
        if path not in PATHS:
            message = f"{FIELD} is not supported by {path}; it is by {', '.join(PATHS)}"
            raise RefusalError(message, FIELD, "unsupported")
        if _is_several(request.get("prompt")):
            message = f"{FIELD} must be left out of requests with several prompts"
            raise RefusalError(message, FIELD, "unsupported")
        if self._taken >= MAX_TRACES:
            message = (
                f"{FIELD}: {MAX_TRACES} requests are traced, no more at a time; try again later"
            )
            raise RefusalError(message, FIELD, "unsupported", status=429)
        self._taken += 1

    def give_back(self) -> None:
        """A traced request has ended."""
        self._taken -= 1


def _is_several(prompt: Any) -> bool:
    """Several texts, or several lists of tokens; one list of numbers is one prompt."""
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
