# SPDX-License-Identifier: Apache-2.0
"""Programs that are run to their end, and what they come to meanwhile."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(
    *command: str | Path, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """What it said, and its exit code, whatever that is.

    Args:
        environment: what is different in it.
    """
    given = {"env": os.environ | (environment or {})} | options
    return subprocess.run(command, capture_output=True, text=True, check=False, **given)


def python(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """This one, with our environment."""
    return run(sys.executable, *arguments, **options)


def until(condition: Callable[[], object], seconds: float = 300) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
