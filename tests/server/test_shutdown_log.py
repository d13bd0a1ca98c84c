# SPDX-License-Identifier: Apache-2.0
"""What the log says of an engine that was told to stop."""

from __future__ import annotations

import logging


class TestShutdownFilter:
    """Only the report of the engine's death, and only after it was told to stop."""

    @staticmethod
    def record(name: str, message: str, error: Exception | None = None) -> logging.LogRecord:
        info = (type(error), error, None) if error else None
        return logging.LogRecord(name, logging.ERROR, "f", 1, message, (), info)

    def test_engine_death_is_reported_unless_it_was_asked_for(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        from h2o_vllm.server.shutdown_log import ShutdownFilter

        quiet = ShutdownFilter()
        death = self.record(ShutdownFilter.NOISE, "failed", EngineDeadError())
        other = self.record(ShutdownFilter.NOISE, "failed", ValueError())
        assert quiet.filter(death)
        assert quiet.filter(self.record(ShutdownFilter.START, "[shutdown] API server: triggered"))
        assert not quiet.filter(death)
        assert quiet.filter(other)
