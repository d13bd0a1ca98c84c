# SPDX-License-Identifier: Apache-2.0
"""A file with the step times of a machine: vLLM's and ours, and how the engine schedules there. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.plan.fit import Linear, Residual
from loadtest.plan.scheduling import EngineSettings

__all__ = [
    "Calibration",
    "CalibrationError",
    "Measured",
    "from_row",
    "read_calibration",
    "to_row",
    "write_calibration",
]

STOCK, OURS = "stock", "h2o"


class CalibrationError(ValueError):
    """A file that is no calibration, or that is not enough for a plan."""


@dataclass(frozen=True)
class Measured:
    """One engine's.

    Attributes:
        scheduling: ``block_size``, ``max_num_seqs``, ``max_num_batched_tokens``, ``pipelined``.
    """

    linear: Linear
    residual: Residual
    scheduling: Mapping[str, Any]


@dataclass(frozen=True)
class Calibration:
    """Both engines', and with what they were measured.

    Attributes:
        about: a row of results: machine, versions, date, model, dtype.
    """

    engines: Mapping[str, Measured]
    about: Mapping[str, Any]

    def step_time(self, ours: bool) -> Linear:
        """Of our engine or of vLLM's."""
        return self.engines[OURS if ours else STOCK].linear

    def engine(self, ours: bool, pool_tokens: int, max_model_len: int) -> EngineSettings:
        """What decides about scheduling in a pool of so many tokens.

        Raises:
            CalibrationError: the pool holds nothing.
        """
        if not pool_tokens:
            raise CalibrationError(
                "--pool-tokens: got 0, wanted the KV memory that --calibration has"
            )
        scheduling = self.engines[OURS if ours else STOCK].scheduling
        blocks = pool_tokens // scheduling["block_size"] + 1
        return EngineSettings(
            ours=ours, num_blocks=blocks, max_model_len=max_model_len, **scheduling
        )


def to_row(calibration: Calibration) -> dict[str, Any]:
    """As JSON has it."""
    return asdict(calibration)


def from_row(row: Mapping[str, Any]) -> Calibration:
    """The inverse of :func:`to_row`. Raises ``KeyError``, ``TypeError`` or ``AttributeError``: it is none."""
    engines = {
        name: Measured(
            linear=Linear(one["linear"]["constant"], tuple(one["linear"]["costs"])),
            residual=Residual(**one["residual"]),
            scheduling=one["scheduling"],
        )
        for name, one in row["engines"].items()
    }
    return Calibration(engines, row["about"])


def write_calibration(calibration: Calibration, path: Path) -> None:
    """As JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(to_row(calibration), indent=1)}\n")


def read_calibration(path: Path) -> Calibration:
    """The inverse of :func:`write_calibration`.

    Raises:
        CalibrationError: ``path`` has none.
    """
    try:
        return from_row(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(
            f"--calibration: {path} is no file of python -m loadtest.plan.calibrate"
        ) from error
