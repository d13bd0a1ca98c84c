# SPDX-License-Identifier: Apache-2.0
"""The page ``/h2o/``: look at what is kept, and compare answers. API-server process; ``--kv-playground``.

==========  =================================================================================
``pieces``  ``POST /h2o/pieces``: the text of single tokens, to lay a trace over
``static``  HTML, CSS and JavaScript modules, each with one subject
==========  =================================================================================

The files are served as they are. They are read once, at the start: a request names a file of a fixed list,
never a path. The page may connect only to this server, and no other page may frame it.
"""

from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from typing import Any

from fastapi.responses import Response

from h2o_vllm.server.playground import pieces
from h2o_vllm.server.routes import route_path

PATH = "/h2o/"

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


def attach(application: Any) -> None:
    """Add the page, a GET route for each file, and what it asks for to vLLM's application."""
    for name, (content, media_type) in files().items():
        application.add_api_route(
            PATH if name == "index.html" else PATH + name,
            _answering(content, media_type),
            methods=["GET", "HEAD"],
            include_in_schema=False,
        )
    pieces.attach(application, PATH)


def is_page(scope: Mapping[str, Any]) -> bool:
    """Whether a request reads a file of the page."""
    return scope.get("method") in ("GET", "HEAD") and f"{route_path(scope)}/".startswith(PATH)


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
