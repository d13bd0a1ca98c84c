# SPDX-License-Identifier: Apache-2.0
"""No ``torch.compile`` where it would end or delay the engine. Before torch is imported; stdlib only.

torch compiles for CPUs with a C++ compiler and Python's headers. vLLM (0.32) compiles single functions even
with ``--enforce-eager``, such as the one that counts ranks for ``logprobs``, when a request asks for it. A
system without either would lose the engine of all to that request. With both, all requests wait for the
compiler at the first such request: 25 s on a CPU of 2021.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

__all__ = ["has_cpu_torch", "missing", "switch_off"]

VARIABLE = "TORCH_COMPILE_DISABLE"
"""Read when ``torch._dynamo.config`` is imported."""


def has_cpu_torch() -> bool:
    """Whether torch is installed in its build for CPUs."""
    try:
        return "+cpu" in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False


def missing() -> str:
    """What torch's CPU build lacks here for compiling, in words; empty: nothing, or another build."""
    if not has_cpu_torch():
        return ""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if not shutil.which(compiler[0]):
        return "g++ (or CXX)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (Debian: python3-dev)"
    return ""


def switch_off(*, eager: bool = False) -> str:
    """Switch it off on CPUs where it cannot work or the engine is eager, unless the variable is set.

    Args:
        eager: the model itself is not compiled.

    Returns:
        What is missing, or nothing.
    """
    if os.environ.get(VARIABLE):
        return ""
    lacking = missing()
    if lacking or (eager and has_cpu_torch()):
        os.environ[VARIABLE] = "1"
    return lacking
