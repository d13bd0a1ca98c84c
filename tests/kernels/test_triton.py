# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels without a GPU; the tests are in ``tests/kernels/triton``."""

from pathlib import Path

from tests.interpreted import OTHERS, files_of, needs_triton, run_interpreted


@needs_triton
@files_of(Path(__file__).parent / "triton", ("test_compact.py", "test_decode.py"), slow=(OTHERS,))
def test_kernels_equal_their_reference_under_the_interpreter(
    paths: list[Path], fast: bool, long: bool
) -> None:
    run_interpreted(paths, fast=fast, long=long)
