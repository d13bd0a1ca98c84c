# SPDX-License-Identifier: Apache-2.0
"""Our GPU adaptors without a GPU, each file in a process of its own (see ``tests/engine/cuda``)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "cuda"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_gpu_adaptors_under_the_interpreter(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stderr[-2000:]
