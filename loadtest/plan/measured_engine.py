# SPDX-License-Identifier: Apache-2.0
"""An engine that serves a validation's cases, and is calibrated in the same process before and after them."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest.common.child import Child
from loadtest.plan.calibration import OURS, STOCK, Calibration, Measured
from loadtest.plan.fit import MeasuredStep, fit, residual
from loadtest.plan.recording import read_steps

__all__ = ["MeasuredEngine", "calibration_of"]


class MeasuredEngine(ExitStack):
    """From its constructor to the end of the block.

    Args:
        first: what :mod:`.validate_run` reads first, but for the file of steps.
    """

    def __init__(self, first: dict[str, Any]) -> None:
        super().__init__()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self._steps = Path(folder) / "steps.jsonl"
        self._child = self.enter_context(
            Child("loadtest.plan.validate_run", first | {"steps": str(self._steps)})
        )
        self._child.request("warm up")
        self.scheduling: dict[str, Any] = {}
        """See :class:`.calibration.Measured`; known after :meth:`batches`."""

    def batches(self) -> list[MeasuredStep]:
        """Serve those of a calibration; returns their steps."""
        self._steps.unlink()
        self.scheduling = self._child.request("batches")
        return read_steps(self._steps)

    def measure(self, case: str) -> dict[str, float]:
        """Serve a case, to its end."""
        return self._child.request(case)


def calibration_of(
    steps: list[MeasuredStep], scheduling: dict[str, Any], *, ours: bool
) -> Calibration:
    """Of one engine alone."""
    linear = fit([], steps)[1] if ours else fit(steps, [])[0]
    measured = Measured(linear, residual(linear, steps), scheduling)
    return Calibration({OURS if ours else STOCK: measured}, {})
