# SPDX-License-Identifier: Apache-2.0
"""The page ``/h2o/``: look at what is kept, and compare answers. API-server process; ``--kv-playground``.

==========  =================================================================================
``page``    serves the files of ``static``, as they are, under a policy that keeps other origins out
``pieces``  ``POST /h2o/pieces``: the text of single tokens, to lay a trace over
``static``  HTML, CSS and JavaScript modules, each with one subject
==========  =================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from h2o_vllm.server.routes import route_path

PATH = "/h2o/"


def attach(application: Any) -> None:
    """Add the page and what it asks for to vLLM's application."""
    from h2o_vllm.server.playground import page, pieces

    page.attach(application, PATH)
    pieces.attach(application, PATH)


def is_page(scope: Mapping[str, Any]) -> bool:
    """Whether a request reads a file of the page."""
    return scope.get("method") in ("GET", "HEAD") and f"{route_path(scope)}/".startswith(PATH)
