# SPDX-License-Identifier: Apache-2.0
"""Who may ask for a trace, and how many at a time, so that nobody else notices. API-server process.

A trace is for looking at one answer: of one sequence, on the two routes that people use, of a length that one
can look at. Whether a server lets anybody ask at all is in :class:`~h2o_vllm.config.options.H2OConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h2o_vllm.blocks.trace import check_traceable
from h2o_vllm.errors import BudgetError
from h2o_vllm.server.before_generate import look_before, token_ids
from h2o_vllm.server.protocol import RefusalError

__all__ = ["FIELD", "MAX_TRACES", "PATHS", "TraceSlots", "install"]

FIELD = "kv_trace"

PATHS = ("/v1/chat/completions", "/v1/completions")

MAX_TRACES = 4
"""Traced requests at a time, of one API server: of the largest models each takes some megabytes."""


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


def install(engine_client: Any, model_config: Any) -> None:
    """Wrap ``engine_client.generate``, on this object only. Twice is the same as once.

    What only the parameters made of a body tell is refused here.
    """

    def limit(prompt: Any, params: Any) -> None:
        asked = getattr(params, "extra_args", None)
        if isinstance(asked, Mapping) and asked.get(FIELD):
            _check(model_config, prompt, params)

    look_before(engine_client, "_h2o_trace_limits", limit)


def _check(model_config: Any, prompt: Any, params: Any) -> None:
    if params.n != 1:
        raise BudgetError(FIELD, True, f"left out of requests with n above 1 (here {params.n})")
    tokens = token_ids(model_config, prompt)
    if tokens is None:
        raise BudgetError(FIELD, True, "left out of requests whose prompt is no tokens")
    longest = min(len(tokens) + params.max_tokens, model_config.max_model_len)
    check_traceable(longest, stops=bool(params.stop))


def _is_several(prompt: Any) -> bool:
    """Several texts, or several lists of tokens; one list of numbers is one prompt."""
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
