# SPDX-License-Identifier: Apache-2.0
"""How ``csrc/`` becomes a library: sources, compiler, flags, and the CPUs a wheel carries libraries for.

Runs in the worker and, loaded by its path, in ``wheel.py``: imports the standard library alone.
"""

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "csrc"
LIBRARIES = Path(__file__).parent / "lib"
"""Where a wheel has its libraries. A checkout has no such folder."""
# No -ffast-math: NaN in slots that were never written must stay out, and exp2's rounding trick must stay in.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fPIC", "-fopenmp", "-w")
TIMEOUT = 300  # seconds; a build takes about ten

_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


class Level(NamedTuple):
    """One instruction-set level: how to compile for it, and what ``/proc/cpuinfo`` must list to run it."""

    flags: tuple[str, ...]
    needs: tuple[str, ...]


_BF16 = ("-march=x86-64-v4", "-mavx512bf16", "-mtune=sapphirerapids")
LEVELS = {
    "amx": Level(
        (*_BF16, "-mamx-tile", "-mamx-bf16"), (*_V4, "avx512_bf16", "amx_tile", "amx_bf16")
    ),
    "avx512bf16": Level(_BF16, (*_V4, "avx512_bf16")),
    "avx512": Level(("-march=x86-64-v4", "-mtune=skylake-avx512"), _V4),
    "avx2": Level(("-march=x86-64-v3", "-mtune=haswell"), _V3),
}
"""What the sources distinguish, best first. x86-64 only, and from AVX2 on, as vLLM's own CPU build.
``-mtune`` decides the order of instructions only; with it one is as fast as a library built for the very CPU.
"""


def compiler() -> list[str]:
    """The C++ compiler as a command: ``CXX``, else the first that is in ``PATH``.

    Raises:
        OSError: there is none.
    """
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen)
        if command and shutil.which(command[0]):
            return command
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise OSError("no C++ compiler found (set CXX or install g++)")


def source_files() -> list[str]:
    """What is compiled."""
    return sorted(map(str, SOURCES.glob("*.cpp")))


def run(command: list[str]) -> None:
    """Run the compiler.

    Raises:
        OSError: it failed or took too long; the message has the end of what it said.
    """
    try:
        # S603: the command is the user's own compiler on our own sources.
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took more than {TIMEOUT} s") from error
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()[-600:]}")


def build_levels(directory: Path) -> dict[str, str]:
    """Build a library for each of :data:`LEVELS` into ``directory``.

    Returns:
        Level to error message, for those that could not be built.

    Raises:
        OSError: none could: no compiler, or a machine that has no levels.
    """
    command, machine = compiler(), platform.machine()
    if machine != "x86_64":
        raise OSError(f"no libraries are kept for {machine}")
    directory.mkdir(parents=True, exist_ok=True)
    errors = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {name: pool.submit(_build, command, name, directory) for name in LEVELS}
        for name, job in jobs.items():
            try:
                job.result()
            except OSError as error:
                errors[name] = str(error)
    if len(errors) == len(LEVELS):
        raise OSError("; ".join(errors.values()))
    return errors


def _build(command: list[str], name: str, directory: Path) -> None:
    flags, target = LEVELS[name].flags, directory / f"h2o-{name}.so"
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for source in source_files():
            objects.append(str(Path(scratch) / f"{Path(source).stem}.o"))
            run([*command, *FLAGS, *flags, "-c", source, "-o", objects[-1]])
        # Linked without an OpenMP runtime, whose name and place differ from machine to machine: its symbols
        # bind to the one that torch runs on, when the library is loaded.
        run([*command, "-shared", "-s", *objects, "-o", str(target)])
