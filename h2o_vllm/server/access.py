# SPDX-License-Identifier: Apache-2.0
"""``--api-key`` for every route but those for health and monitoring. API-server process.

vLLM 0.32 checks the key only below ``/v1``, ``/v2``, ``/inference`` and ``/cohere``: ``/invocations``,
``/tokenize`` and the development routes work without it. Here every route that is not in :data:`OPEN` needs
the key. The playground's page also takes it as the password of Basic authentication.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from fastapi.datastructures import Headers
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from h2o_vllm.server.playground import is_page
from h2o_vllm.server.routes import route_path

OPEN = frozenset(
    {"/health", "/ping", "/version", "/load", "/metrics", "/docs", "/redoc", "/openapi.json"}
)
"""Health and monitoring, which vLLM leaves open as well."""


class Access:
    """Which requests pass.

    Args:
        application: vLLM's FastAPI application, with its arguments in ``state.args``.
    """

    def __init__(self, application: Any) -> None:
        args = getattr(application.state, "args", None)
        given = getattr(args, "api_key", None) or [envs.VLLM_API_KEY]
        self.keys = [key for key in given if key]
        self._authentication = AuthenticationMiddleware(application, tokens=self.keys)

    def refuses(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request or websocket lacks the key. CORS preflights carry none."""
        if not self.keys or scope.get("method") == "OPTIONS":
            return False
        # Prometheus' application is mounted: /metrics is redirected to /metrics/.
        if route_path(scope).removesuffix("/") in OPEN:
            return False
        headers = Headers(raw=list(scope["headers"]))
        if self._authentication.verify_token(headers):
            return False
        return not (is_page(scope) and self._authentication.verify_token(_from_basic(headers)))

    def challenge(self, scope: Mapping[str, Any]) -> dict[str, str]:
        """Headers of the 401: on the page a browser asks its user for the key."""
        if not is_page(scope):
            return {}
        return {"WWW-Authenticate": 'Basic realm="the API key is the password", charset="UTF-8"'}


def _from_basic(headers: Headers) -> Headers:
    """The password of Basic authentication as a key.

    Only for the page's files: a browser also sends these credentials with requests that other sites cause.
    """
    scheme, _, encoded = headers.get("Authorization", "").partition(" ")
    try:
        password = base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError, ValueError):
        password = ""
    return Headers({"Authorization": f"Bearer {password}"} if scheme.lower() == "basic" else {})
