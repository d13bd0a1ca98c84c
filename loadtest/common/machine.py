# SPDX-License-Identifier: Apache-2.0
"""What a measured number has to be read with: when, where, with which versions, commit and command."""

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MASKED = {"--api-key": "KEY", "--hf-token": "KEY", "--url": "URL", "--vllm-url": "URL"}
"""Options with values that are not shown, and what stands in its place."""

_URL = re.compile(r"https?://\S+")
# Not behind a word: `owner/model` is a name, and so is 0.2/window.
_FOLDERS = re.compile(r"(?<![^\s=,:])(?:~|\.\.)?/(?:[^\s/=,]+/)*(?=[^\s/=,])")


def describe_run(module: str) -> dict[str, Any]:
    """The fields every result row begins with; ``module`` is what ``python -m`` was given."""
    import torch
    from vllm.version import __version__ as vllm_version

    host = describe_host()
    versions = {**host["versions"], "vllm": vllm_version, "torch": torch.__version__}
    return {**host, "command": shown_command(f"python -m {module}"), "versions": versions}


def describe_host() -> dict[str, Any]:
    """The same for a process that needs neither vLLM nor torch: a load generator."""
    from h2o_vllm import __version__

    commit = _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
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
        "commit": commit or None,
        "machine": f"{cpu}, {os.cpu_count()} cores",
        "versions": {"h2o_vllm": __version__, "python": platform.python_version()},
    }


def describe_gpu() -> dict[str, Any]:
    """Which GPU and driver; nothing where ``nvidia-smi`` is not."""
    fields = "name,driver_version,memory.total,clocks.max.sm"
    found = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader").splitlines()
    return {
        "gpu": dict(zip(fields.split(","), found[0].split(", "), strict=True)) if found else None
    }


def shown_command(program: str, argv: Sequence[str] | None = None) -> str:
    """``program`` with its options (this process's by default), as others may read them.

    Absolute paths lose their folders, of which the reader's machine has none; URLs and keys are masked.
    """
    shown = []
    masked = ""
    for word in sys.argv[1:] if argv is None else argv:
        option, equals, value = word.partition("=")
        if not re.fullmatch(r"--[\w-]+", option):
            option, equals, value = "", "", word
        if option and not equals:
            masked = MASKED.get(option, "")
            shown.append(word)
            continue
        value = MASKED.get(option) or masked or _FOLDERS.sub("", _URL.sub("URL", value))
        masked = ""
        shown.append(f"{option}{equals}{value}")
    return f"{program} {shlex.join(shown)}".strip()


def _output(*command: str) -> str:
    """What a command prints; nothing if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
