# SPDX-License-Identifier: Apache-2.0
"""Test files for GPU code without a GPU: under Triton's interpreter, each in a process of its own.

Triton decides when it is first imported whether it interprets, for its own library as well, and torch or vLLM
may have imported it long before. On a GPU the same code is tested in ``tests/gpu``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["files_of", "needs_triton", "run_interpreted"]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def files_of(folder: Path) -> pytest.MarkDecorator:
    """Parametrizes ``path`` with the test files of ``folder``."""
    paths = sorted(folder.glob("test_*.py"))
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


def run_interpreted(path: Path) -> None:
    """Run the tests of one file; fails as they do, with their output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stderr[-2000:]
