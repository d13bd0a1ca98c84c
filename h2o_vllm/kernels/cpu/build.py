# SPDX-License-Identifier: Apache-2.0
"""Load the library that the wheel carries for this CPU, or compile ``csrc/`` for this very machine, once.

Runs in the worker. Imports the standard library. ``wheel.py`` puts libraries into
wheels (see :func:`.toolchain.build_levels`); a checkout and an editable install have none. What is compiled
here goes into the user's cache directory under a name that says what it was built from: sources, compiler,
flags, CPU. It is written under a temporary name and renamed, so processes that build at the same time cannot
see half a file.
"""

import ctypes
import hashlib
import logging
import os
import platform
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from h2o_vllm.kernels.cpu import toolchain

logger = logging.getLogger(f"vllm.{__name__}")


def load() -> ctypes.CDLL:
    """The library, with the process's OpenMP.

    Raises:
        OSError: it has to be compiled and cannot be; the message says why.
    """
    carried = prebuilt()
    if carried is not None:
        try:
            # Linked without OpenMP: with two runtimes in one process there would be two sets of threads, one
            # not bound to vLLM's cores.
            ctypes.CDLL(loaded_openmp() or "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(carried))
        except OSError as error:
            logger.warning("Prebuilt H2O CPU kernels refused, building from source: %s", error)
    return ctypes.CDLL(str(library()))


def prebuilt() -> Path | None:
    """Path of the best library in the wheel that this CPU can run; ``None`` if there is none."""
    has = cpu_features()
    paths = (
        toolchain.LIBRARIES / f"h2o-{name}.so"
        for name, level in toolchain.LEVELS.items()
        if has.issuperset(level.needs)
    )
    return next((path for path in paths if path.is_file()), None)


def library() -> Path:
    """Path of the compiled library, built now if need be.

    Raises:
        OSError: there is no compiler, it failed, or nothing can be written; the message says which.
    """
    compiler = toolchain.compiler()
    tune = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    command = [*compiler, *toolchain.FLAGS, "-shared", tune, *toolchain.source_files()]
    if runtime := loaded_openmp():
        # Named before the compiler's own, so the symbols bind to the OpenMP torch runs on: two of them in
        # one process means two sets of threads, one not bound to vLLM's cores.
        command += [runtime, "-Wl,--as-needed"]
    name = f"h2o-{_fingerprint(command)}.so"
    places = list(_directories())
    for directory in places:
        if (directory / name).is_file() and _ours(directory):
            return directory / name
    errors = []
    for directory in places:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _ours(directory):
                return _compile(command, directory / name)
            errors.append(f"{directory} belongs to another user or can be written by others")
        except OSError as error:
            # The compiler's have no number.
            if error.errno is None:
                raise
            errors.append(str(error))
    raise OSError("no directory to build in: " + "; ".join(errors))


def _compile(command: list[str], target: Path) -> Path:
    handle, temporary = tempfile.mkstemp(prefix=".build-", suffix=".so", dir=target.parent)
    os.close(handle)
    started = time.monotonic()
    try:
        toolchain.run([*command, "-o", temporary])
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    logger.info("Built the H2O CPU kernels in %.0f s: %s", time.monotonic() - started, target)
    return target


def _directories() -> list[Path]:
    """Where the library may live: the user's cache, else a private folder for temporary files."""
    private = Path(tempfile.gettempdir()) / f"h2o_vllm-{os.getuid()}"
    try:
        user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        # No HOME, and a uid that is not in passwd.
        return [private]
    return [user / "h2o_vllm", private]


def _ours(directory: Path) -> bool:
    """Whether only this user can have put files there: what lies there gets executed."""
    state = directory.stat()
    return state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def loaded_openmp() -> str | None:
    """Path of the GNU OpenMP runtime that is already in this process (torch brings its own)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    return min(paths) if paths else None


def cpu_features() -> set[str]:
    """The instruction sets of this CPU, by Linux's names."""
    return {word for line in _cpuinfo("flags", "Features") for word in line.split()}


def _fingerprint(command: list[str]) -> str:
    """What a library is made from: the sources, headers included, the compiler, its flags, and the CPU."""
    digest = hashlib.sha256()
    for source in sorted(toolchain.SOURCES.glob("*.[ch]pp")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    # S603: the user's own compiler.
    version = subprocess.run(  # noqa: S603
        [command[0], "--version"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    # Model and instruction sets: a home directory may be shared by unlike machines.
    cpu = _cpuinfo("flags", "Features", "model name", "CPU implementer", "CPU part")
    digest.update("\0".join((*command, version, platform.machine(), *cpu)).encode())
    return digest.hexdigest()[:16]


def _cpuinfo(*names: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(names)})
