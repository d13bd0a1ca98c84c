# SPDX-License-Identifier: Apache-2.0
"""What a measured number has to be read with: when, where, with which versions and commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["describe_host", "describe_run"]


def describe_run(module: str) -> dict[str, Any]:
    """The fields every result row begins with; ``module`` is what ``python -m`` was given.

    Absolute paths lose their folders: the reader's machine has none of them.
    """
    import torch
    from vllm.version import __version__ as vllm_version

    host = describe_host()
    versions = {**host["versions"], "vllm": vllm_version, "torch": torch.__version__}
    return {
        **host,
        "command": " ".join([f"python -m {module}", *map(_without_folders, sys.argv[1:])]),
        "versions": versions,
    }


def describe_host() -> dict[str, Any]:
    """The same for a process that needs neither vLLM nor torch: a load generator."""
    from h2o_vllm import __version__

    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip() if git.returncode == 0 else None,
        "machine": f"{cpu}, {os.cpu_count()} cores",
        "versions": {"h2o_vllm": __version__, "python": platform.python_version()},
    }


def _without_folders(argument: str) -> str:
    """An absolute path's last part, also behind ``--option=``; anything else as it is."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}"
