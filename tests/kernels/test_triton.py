# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels under Triton's interpreter, each file in a process of its own.

Triton decides when it is first imported whether it interprets, for its own library as well, and torch or vLLM
may have imported it long before. On a GPU the same kernels are tested in ``tests/gpu``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels_equal_their_reference_under_the_interpreter(name: str) -> None:
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
