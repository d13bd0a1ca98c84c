# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels without a GPU; the tests are in ``tests/kernels/triton``."""

from pathlib import Path

from tests.interpreted import needs_triton, run_interpreted

FAST = ("compact", "decode")
"""What the fast tier asks of them: what moves tokens, and what attends."""


@needs_triton
def test_kernels_equal_their_reference_under_the_interpreter(fast: bool, long: bool) -> None:
    paths = sorted((Path(__file__).parent / "triton").glob("test_*.py"))
    if fast:
        paths = [path for path in paths if path.stem.removeprefix("test_") in FAST]
        assert len(paths) == len(FAST)
    run_interpreted(paths, fast=fast, long=long)
