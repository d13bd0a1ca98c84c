# SPDX-License-Identifier: Apache-2.0
"""The libraries that a wheel carries: load the best one that fits this CPU and the sources beside it.

Runs in the worker. Imports the standard library and :mod:`h2o_vllm.errors`. ``wheel.py`` has put them there
(see :func:`.toolchain.build_levels`); a checkout has none. One that does not fit is refused with a warning,
and :mod:`~h2o_vllm.kernels.cpu.build` builds from source. ``H2O_CPU_BUILD=source`` does so always.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
from pathlib import Path

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.cpu import build, toolchain

# Below "vllm", so that vLLM's logging configuration applies where there is one.
logger = logging.getLogger(f"vllm.{__name__}")


def load() -> ctypes.CDLL | None:
    """The prebuilt library, loaded; None where there is none, none fits, or it is not wanted.

    Raises:
        ConfigError: ``H2O_CPU_BUILD`` is something else than ``source``.
    """
    wanted = os.environ.get("H2O_CPU_BUILD") or None
    if wanted not in (None, "source"):
        raise ConfigError(f"H2O_CPU_BUILD must be source or unset, got {wanted!r}")
    if wanted == "source" or not toolchain.LIBRARIES.is_dir():
        return None
    try:
        library = fitting()
        # It was linked without an OpenMP runtime: with two in one process there would be two sets of threads,
        # one not bound to vLLM's cores.
        ctypes.CDLL(build.loaded_openmp() or "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))
    except OSError as error:
        logger.warning("Prebuilt H2O CPU kernels refused, building from source: %s", error)
        return None


def fitting() -> Path:
    """Path of the best library for this CPU, checked.

    Raises:
        OSError: none fits; the message says why.
    """
    try:
        manifest = json.loads((toolchain.LIBRARIES / toolchain.MANIFEST).read_text())
        machine, entries = manifest["machine"], dict(manifest["libraries"])
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{toolchain.MANIFEST} cannot be read: {error!r}") from error
    if machine != platform.machine():
        raise OSError(f"they are for {machine}, this is {platform.machine()}")
    has = build.cpu_features()
    for name, level in toolchain.LEVELS.items():
        if name in entries and has.issuperset(level.needs):
            break
    else:
        raise OSError(f"this CPU can run none of {', '.join(entries)}")
    entry, path = entries[name], toolchain.LIBRARIES / f"h2o-{name}.so"
    if entry.get("fingerprint") != toolchain.fingerprint(*level.flags):
        raise OSError(f"{path.name} was built from other sources or flags")
    # Not left to the loader: half a file can end the process there.
    if entry.get("sha256") != hashlib.sha256(path.read_bytes()).hexdigest():
        raise OSError(f"{path.name} is damaged")
    return path
