# SPDX-License-Identifier: Apache-2.0
"""Our GPU adaptors without a GPU; the tests are in ``tests/engine/cuda``."""

from pathlib import Path

from tests.interpreted import OTHERS, files_of, needs_triton, run_interpreted


@needs_triton
@files_of(
    Path(__file__).parent / "cuda",
    ("test_policies.py", "test_steps.py"),
    slow=("test_policies.py", "test_steps.py", OTHERS),
)
def test_gpu_adaptors_under_the_interpreter(paths: list[Path], fast: bool, long: bool) -> None:
    run_interpreted(paths, fast=fast, long=long)
