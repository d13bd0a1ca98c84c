# SPDX-License-Identifier: Apache-2.0
"""How the server of this process ends: refused, stopped, or with a dead engine. Imports nothing.

vLLM builds the application, so the command has no reference to the middleware. Both use this module.
When its engine dies, vLLM's server (0.32) answers ``/health`` with 503, ends its streams with an error, and
exits some seconds later with code 0: a supervisor that restarts failed services would leave it down.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

OF_THE_ENGINE = "vllm.v1.engine.async_llm"
"""vLLM's logger of an engine's death."""


@dataclass
class _Ending:
    """Why the middleware refused to start; whether vLLM stopped the engine, or it died."""

    refusal: str | None = None
    stopped: bool = False
    died: bool = False


ending = _Ending()


def watch(engine_client: Any) -> None:
    """Note when vLLM stops its engine: wraps ``engine_client.shutdown``, on this object only.

    Raises:
        AttributeError: the object cannot be watched.
    """
    ending.stopped = ending.died = False
    shutdown, _ = engine_client.shutdown, engine_client.errored

    @functools.wraps(shutdown)
    def noted(*args: Any, **kwargs: Any) -> Any:
        ending.stopped = True
        # vLLM may log a stopped engine as dead, with a traceback.
        logging.getLogger(OF_THE_ENGINE).setLevel(logging.CRITICAL)
        return shutdown(*args, **kwargs)

    engine_client.shutdown = noted


def server_stops(engine_client: Any) -> None:
    """Note how the engine ended. vLLM stops the server after the engine."""
    ending.died = engine_client.errored and not ending.stopped
