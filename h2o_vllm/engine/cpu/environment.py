# SPDX-License-Identifier: Apache-2.0
"""Environment variables of an engine on CPUs. Set by the process that starts the engine; stdlib only.

The C library reads its own before a program's first line, so a process gets them from the one that spawns it.
What the user has set wins.
"""

import os
import shlex
import shutil
import sysconfig
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path

FEW_CORES = 4
"""Up to as many the model runs inside the engine core, on all of them."""

SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which users say how GNU's OpenMP waits."""

SPINS = "2000"
"""Rounds that a waiting thread spins; GNU's OpenMP has 300,000. A thread that spins takes a core from others.

2,000, 20,000 and 100,000 on 2 cores of Zen 4, 16 requests of 256 + 256 tokens: 387, 406 and 387 tok/s on a
quiet machine, 139, 51 and 30 beside a process that keeps one core busy.
"""

TUNABLES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,
        "mmap_threshold": 32 << 20,
        "trim_threshold": (1 << 31) - 1,
        "top_pad": 64 << 20,
    }.items()
)
"""glibc asks for huge pages (2.35 or later, where Linux gives them on request), and keeps what is freed.

A decode step reads all weights, and looks up each page's address; the KV pool's blocks lie anywhere. A step
over a prompt allocates some tens of megabytes per layer, which the kernel would zero anew in the next one.
"""

MALLOC = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Variables by which users say how glibc allocates."""


COMPILE = "TORCH_COMPILE_DISABLE"
"""torch compiles for CPUs with a C++ compiler and Python's headers. vLLM (0.32) compiles single functions
even with ``--enforce-eager``, such as the one that counts ranks for ``logprobs``, when a request asks for it:
a system without either would lose the engine to that request, and with both all requests wait for 25 s."""

AOT = ("VLLM_USE_AOT_COMPILE", "VLLM_FORCE_AOT_LOAD")
"""vLLM stores the compiled model as a whole, and on CPUs cannot load it: ``_try_load_aot_compiled_fn`` (0.32)
asks Inductor's function for ``finalize_loading``, which only that of vLLM's own backend has. So it compiles
at each start, *due to a load failure*. Without, all but the trace comes out of Inductor's cache: a start on
two cores took 19 s in place of 47. It can go when the message is gone."""


def prepare(*, eager: bool = False) -> str:
    """All of this module, for processes started from now on.

    To be called before torch is imported where this very process is to compile nothing.

    Args:
        eager: the model itself is not compiled.

    Returns:
        What is missing for compiling, in words, or nothing.
    """
    set_defaults()
    return switch_off_compiling(eager=eager)


def has_cpu_torch() -> bool:
    """Whether torch is installed in its build for CPUs."""
    try:
        return "+cpu" in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set each variable for which the user has set none of the same purpose."""
    wanted = [(MALLOC, "GLIBC_TUNABLES", TUNABLES), (AOT, "VLLM_USE_AOT_COMPILE", "0")]
    if len(os.sched_getaffinity(0)) <= FEW_CORES:
        wanted.append((SPINNING, "GOMP_SPINCOUNT", SPINS))
    for alike, name, value in wanted:
        if not any(one in environment for one in alike):
            environment[name] = value


def switch_off_compiling(*, eager: bool = False) -> str:
    """Compile nothing where it cannot work, or the engine is eager; returns what is missing."""
    if os.environ.get(COMPILE):
        return ""
    lacking = _missing()
    if lacking or (eager and has_cpu_torch()):
        os.environ[COMPILE] = "1"
    return lacking


def _missing() -> str:
    if not has_cpu_torch():
        return ""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if not shutil.which(compiler[0]):
        return "g++ (or CXX)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (Debian: python3-dev)"
    return ""
