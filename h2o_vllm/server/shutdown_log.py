# SPDX-License-Identifier: Apache-2.0
"""Keep a traceback out of an orderly end. Runs in every API-server process; imports nothing of vLLM.

Told to stop, vLLM's API server ends the engine first. Its output loop may notice that before its
own end, and then logs the death of the engine with a traceback, as if something had gone wrong.
"""

from __future__ import annotations

import logging

__all__ = ["ShutdownFilter"]


class ShutdownFilter(logging.Filter):
    """Drops the report that the engine has died, once it has been told to."""

    START = "vllm.entrypoints.launchers.launcher"
    NOISE = "vllm.v1.engine.async_llm"

    def __init__(self) -> None:
        super().__init__()
        self._stopping = False

    @classmethod
    def install(cls) -> None:
        """Hang one filter into vLLM's two loggers; twice is the same as once."""
        loggers = [logging.getLogger(name) for name in (cls.START, cls.NOISE)]
        if not any(isinstance(each, cls) for each in loggers[0].filters):
            ours = cls()
            for logger in loggers:
                logger.addFilter(ours)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log ``record``."""
        if record.name == self.START and "[shutdown]" in str(record.msg):
            self._stopping = True
        raised = record.exc_info[0] if record.exc_info else None
        dead = raised is not None and raised.__name__ == "EngineDeadError"
        return not (self._stopping and dead)
