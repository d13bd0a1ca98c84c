# SPDX-License-Identifier: Apache-2.0
"""Locust in a process of its own: gevent patches whatever shares one with it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


class LocustError(Exception):
    """Locust failed; says what it printed."""


@contextmanager
def locust_running(options: Mapping[str, Any]) -> Iterator[None]:
    """A load test without a page, which goes on during the block. Waits for its end, unless the block fails.

    Args:
        options: of Locust and of ours, with their values.

    Raises:
        LocustError: its exit code is not 0.
    """
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless",
               "--only-summary", "--loglevel", "WARNING", *words]  # fmt: skip
    root = str(LOCUSTFILE.parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield
            printed = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise LocustError(f"locust failed ({process.returncode}):\n" + "\n".join(printed))
