# SPDX-License-Identifier: Apache-2.0
"""Our GPU adaptors without a GPU; the tests are in ``tests/engine/cuda``."""

from pathlib import Path

import pytest

from tests.interpreted import needs_triton, run_interpreted


@needs_triton
@pytest.mark.slow
def test_gpu_adaptors_under_the_interpreter(fast: bool, long: bool) -> None:
    paths = sorted((Path(__file__).parent / "cuda").glob("test_*.py"))
    run_interpreted(paths, fast=fast, long=long)
