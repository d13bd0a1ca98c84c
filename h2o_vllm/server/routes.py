# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's POST routes take the budget fields. API-server process; imports nothing of vLLM.

Some routes apply the fields (``LIFTED``) or pass them on (``PREPARED``). All others refuse them, so a route
that vLLM adds cannot ignore them.
"""

import enum
from collections.abc import Mapping
from typing import Any


class Rule(enum.Enum):
    """How a route treats budget fields."""

    LIFT = "lift"
    """Checked, moved into ``vllm_xargs``, and answered with a ``kv_cache`` report."""

    PREPARE = "prepare"
    """Checked and moved. vLLM answers with what it would generate from, and generates nothing."""

    REFUSE = "refuse"
    """A request that names one gets a 400; all others pass untouched."""


MESSAGES = "/v1/messages"
"""Anthropic's API, whose system prompt, errors and streams have other shapes."""

LIFTED = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        MESSAGES,
        "/invocations",
    }
)

PREPARED = frozenset(
    {
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/v1/responses/render",
        "/v1/messages/render",
    }
)
"""A 403 without vLLM's ``--enable-scale-out``. The answer has the fields in its ``extra_args``; the route
that generates from it refuses them."""


TRACED = ("/v1/chat/completions", "/v1/completions")
"""Routes that take ``kv_trace``."""


def rule_for(method: str, path: str) -> Rule | None:
    """The rule of a request, or ``None`` if it has no body.

    Args:
        path: of the route, see :func:`route_path`.
    """
    if method != "POST":
        return None
    if path in LIFTED:
        return Rule.LIFT
    return Rule.PREPARE if path in PREPARED else Rule.REFUSE


def route_path(scope: Mapping[str, Any]) -> str:
    """The path by which Starlette finds the route of a request, behind a proxy too.

    As ``starlette._utils.get_route_path``: ``--root-path`` is removed as whole path segments or not at all,
    so ``/`` and ``/x/`` remove nothing. Every comparison with a route's path goes through this function.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    rest = path.removeprefix(root)
    return rest if not rest or rest.startswith("/") else path
