# SPDX-License-Identifier: Apache-2.0
"""Tell an engine that died from one that was told to stop. API-server process; imports nothing.

When its engine dies vLLM's server answers ``/health`` with 503, ends its streams with an error, and itself
some seconds later with exit code 0 (0.32): a supervisor that restarts what failed would leave it down.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

OF_THE_ENGINE = "vllm.v1.engine.async_llm"
"""The logger by which an API server says that its engine has died."""


@dataclass
class _Engine:
    """That of this process, as far as its end goes."""

    stopped: bool = False
    died: bool = False


_engine = _Engine()


def watch(engine_client: Any) -> None:
    """Note when vLLM tells its engine to stop: wraps ``engine_client.shutdown``, on this object only.

    Raises:
        AttributeError: the object cannot be watched.
    """
    _engine.stopped = _engine.died = False
    shutdown, _ = engine_client.shutdown, engine_client.errored

    @functools.wraps(shutdown)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _engine.stopped = True
        # vLLM may log the end of its engine as a death, with a traceback.
        logging.getLogger(OF_THE_ENGINE).setLevel(logging.CRITICAL)
        return shutdown(*args, **kwargs)

    engine_client.shutdown = noted


def look(engine_client: Any) -> None:
    """To be called when the server begins to end, which vLLM does after it has told the engine."""
    _engine.died = engine_client.errored and not _engine.stopped


def died() -> bool:
    """Whether the server of this process ended because its engine had died."""
    return _engine.died
