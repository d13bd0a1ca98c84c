# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels without a GPU; the tests are in ``tests/kernels/triton``."""

from pathlib import Path

from tests.interpreted import files_of, needs_triton, run_interpreted


@needs_triton
@files_of(Path(__file__).parent / "triton")
def test_kernels_equal_their_reference_under_the_interpreter(path: Path) -> None:
    run_interpreted(path)
