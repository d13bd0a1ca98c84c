# SPDX-License-Identifier: Apache-2.0
"""Serve the files of the page as they are. API-server process.

They are read once, at the start: a request names a file of a fixed list, never a path. The page may connect
only to this server, and no other page may frame it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from fastapi.responses import Response

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # After an upgrade no browser may mix old files with new ones.
    "Cache-Control": "no-cache",
}

INDEX = "index.html"


def attach(application: Any, path: str) -> None:
    """Add a GET route for each file below ``path``, and for ``path`` itself."""
    for name, (content, media_type) in files().items():
        route = path if name == INDEX else path + name
        application.add_api_route(
            route, _answering(content, media_type), methods=["GET", "HEAD"], include_in_schema=False
        )


def files() -> dict[str, tuple[bytes, str]]:
    """Name -> content and media type, of every file that is served."""
    found = {}
    for file in resources.files(__package__).joinpath("static").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            found[file.name] = (file.read_bytes(), MEDIA_TYPES[suffix])
    return found


def _answering(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return answer
