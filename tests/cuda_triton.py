# SPDX-License-Identifier: Apache-2.0
"""The Triton that servers on GPUs have, in a folder of its own beside the one of the CPU build.

A process that has the folder first in its PYTHONPATH imports it; the rest of its environment stays.
"""

import fcntl
import functools
import os
import re
import shutil
import sys
from pathlib import Path

from tests.processes import run

ROOT = Path(__file__).parents[1]


def cuda_triton_version() -> str:
    """What ``deploy/locks/cuda.txt`` pins."""
    found = re.search(r"^triton==(\S+)", (ROOT / "deploy/locks/cuda.txt").read_text(), re.MULTILINE)
    assert found, "the CUDA lock pins no Triton"
    return found[1]


@functools.cache
def cuda_triton() -> Path:
    """The folder, in this environment; filled from the package index the first time.

    ``H2O_CUDA_TRITON`` may name one that is filled already.
    """
    if "H2O_CUDA_TRITON" in os.environ:
        return Path(os.environ["H2O_CUDA_TRITON"])
    version = cuda_triton_version()
    folder = Path(sys.prefix) / f"h2o-triton-{version}"
    with Path(f"{folder}.lock").open("w") as lock:
        # Processes that share the environment and the tests between them.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _install(version, folder)
    return folder


def _install(version: str, folder: Path) -> None:
    # Whole or not at all.
    part = Path(f"{folder}.part")
    shutil.rmtree(part, ignore_errors=True)
    uv = Path(sys.prefix) / "bin/uv"
    installer = f"{uv} pip install" if uv.exists() else f"{sys.executable} -m pip install"
    install = f"{installer} --no-deps --target {part} triton=={version}"
    script = f". deploy/index.sh && uv_like_pip {sys.executable} && {install}"
    done = run("bash", "-c", script, cwd=ROOT)
    assert done.returncode == 0, f"triton=={version} is not to be had:\n{done.stdout}{done.stderr}"
    part.rename(folder)
