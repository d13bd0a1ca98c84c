# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's POST routes take the budget fields. API-server process; imports nothing of vLLM.

A route that generates tokens either honours the fields (``LIFTED``) or refuses them (``REFUSED``);
one that prepares a generation passes them on (``PREPARED``); only a route that keeps no KV of a
generation may ignore them (``UNTOUCHED``). A test holds these sets against the routes of the installed
vLLM, so that a new route cannot be forgotten.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

__all__ = [
    "LIFTED",
    "MESSAGES",
    "PREPARED",
    "REFUSED",
    "UNTOUCHED",
    "Rule",
    "route_path",
    "rule_for",
]


class Rule(enum.Enum):
    """What happens to the budget fields of a request."""

    LIFT = "lift"
    """Checked, moved into ``vllm_xargs``, and answered with a ``kv_cache`` report."""

    PREPARE = "prepare"
    """Checked and moved. vLLM answers with what it would generate from, and generates nothing."""

    REFUSE = "refuse"
    """A request that names one gets a 400; all others pass untouched."""


MESSAGES = "/v1/messages"
"""Anthropic's API: system prompt, errors and streams have shapes of their own."""

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

REFUSED = frozenset(
    {
        "/cohere/v2/chat",
        "/inference/v1/generate",
        "/generative_scoring",
        "/v1/systemone",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
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
"""Open with vLLM's ``--enable-scale-out``; else a 403, as in vLLM. The answer has the fields in its
``extra_args``: the route that generates from it says that it does not take them."""

UNTOUCHED = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/completions/derender",
        "/v1/chat/completions/derender",
        "/v1/responses/{response_id}/cancel",
        # Pooling models generate nothing.
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/embeddings",
        "/v2/embed",
        # Operations.
        "/ping",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/start_profile",
        "/stop_profile",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/inference/v1/abort_requests",
        "/fault_tolerance/apply",
        "/abort_requests",
        "/collective_rpc",
        "/sleep",
        "/wake_up",
        "/release_kv_cache_memory",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/pause",
        "/resume",
        "/init_weight_transfer_engine",
        "/shutdown_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/weight_checker",
    }
)


def rule_for(method: str, path: str) -> Rule | None:
    """The rule of a request, or ``None`` if it takes no budget fields.

    Args:
        path: of the route, see :func:`route_path`.
    """
    if method != "POST":
        return None
    if path in LIFTED:
        return Rule.LIFT
    if path in PREPARED:
        return Rule.PREPARE
    return Rule.REFUSE if path in REFUSED else None


def route_path(scope: Mapping[str, Any]) -> str:
    """The path by which Starlette finds the route of a request, behind a proxy too.

    As ``starlette._utils.get_route_path``: ``--root-path`` is removed as whole path segments or not at all,
    so ``/`` and ``/x/`` remove nothing. Every comparison with a route's path goes through this function.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    rest = path.removeprefix(root)
    return rest if not rest or rest.startswith("/") else path
