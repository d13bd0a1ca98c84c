# SPDX-License-Identifier: Apache-2.0
"""Distinguish an engine that died from one that was stopped. API-server process; imports nothing.

When its engine dies, vLLM's server (0.32) answers ``/health`` with 503, ends its streams with an error, and
exits some seconds later with code 0: a supervisor that restarts failed services would leave it down.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

OF_THE_ENGINE = "vllm.v1.engine.async_llm"
"""vLLM's logger of an engine's death."""


@dataclass
class _Engine:
    """How the engine of this process ended."""

    stopped: bool = False
    died: bool = False


_engine = _Engine()


def watch(engine_client: Any) -> None:
    """Note when vLLM stops its engine: wraps ``engine_client.shutdown``, on this object only.

    Raises:
        AttributeError: the object cannot be watched.
    """
    _engine.stopped = _engine.died = False
    shutdown, _ = engine_client.shutdown, engine_client.errored

    @functools.wraps(shutdown)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _engine.stopped = True
        # vLLM may log a stopped engine as dead, with a traceback.
        logging.getLogger(OF_THE_ENGINE).setLevel(logging.CRITICAL)
        return shutdown(*args, **kwargs)

    engine_client.shutdown = noted


def server_stops(engine_client: Any) -> None:
    """Note how the engine ended. vLLM stops the server after the engine."""
    _engine.died = engine_client.errored and not _engine.stopped


def died() -> bool:
    """Whether the server of this process ended because its engine had died."""
    return _engine.died
