# SPDX-License-Identifier: Apache-2.0
"""Test files for GPU code without a GPU: under Triton's interpreter, in processes of their own.

Triton decides when it is first imported whether it interprets, for its own library as well, and torch or vLLM
may have imported it long before. On a GPU the same code is tested in ``tests/gpu``.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes import python

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_interpreted(
    paths: Sequence[Path], *, fast: bool, long: bool, first: Path | None = None
) -> None:
    """Run the tests of some files; fails as they do, with their output.

    Args:
        paths: the files, of one folder.
        fast: of their grids take each 29th case, else each 11th, and leave out what is marked slow.
        long: all cases, also of what is marked long.
        first: a folder whose packages stand before the environment's.
    """
    # Named files are run whatever their tests' tier.
    full = ["-m", "not long", "--every", "11"]
    tier = [] if long else ["-m", "not long and not slow", "--every", "29"] if fast else full
    found = [str(first)] if first else []
    found += filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join(found)
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", *tier, *paths),
        cwd=Path(__file__).parents[1], environment=environment,
    )  # fmt: skip
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stderr[-2000:]
