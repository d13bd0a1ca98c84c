# SPDX-License-Identifier: Apache-2.0
"""``--api-key`` for every route but those for health and monitoring. API-server process.

vLLM asks for the key below ``/v1``, ``/v2``, ``/inference`` and ``/cohere`` only (0.32): ``/invocations``
generates for anybody, ``/tokenize`` works for anybody, and so do the routes of its development mode. Here it
is the other way round: what is not listed as open is closed, and so is whatever a later vLLM adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.datastructures import Headers
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

__all__ = ["OPEN", "Access"]

OPEN = frozenset(
    {"/health", "/ping", "/version", "/load", "/metrics", "/docs", "/redoc", "/openapi.json"}
)
"""They say how the server is, not what it was asked. vLLM leaves them open too."""


class Access:
    """Who may pass.

    Args:
        application: vLLM's FastAPI application, with its arguments in ``state.args``.
    """

    def __init__(self, application: Any) -> None:
        args = getattr(application.state, "args", None)
        given = getattr(args, "api_key", None) or [envs.VLLM_API_KEY]
        self.keys = [key for key in given if key]
        self._authentication = AuthenticationMiddleware(application, tokens=self.keys)

    def refuses(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request lacks the key; a preflight of CORS never carries one."""
        if not self.keys or scope["method"] == "OPTIONS":
            return False
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        # Prometheus' application is mounted: /metrics is redirected to /metrics/.
        if path.removesuffix("/") in OPEN:
            return False
        return not self._authentication.verify_token(Headers(raw=list(scope["headers"])))
