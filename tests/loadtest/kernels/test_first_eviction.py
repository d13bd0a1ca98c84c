# SPDX-License-Identifier: Apache-2.0
"""The tool that times first evictions, on the CPU's tensors."""

from loadtest.kernels.first_eviction import on_gpu


def test_a_gpus_row_has_calibrated_evictions_and_those_among_others() -> None:
    row = on_gpu(64, "cpu", layers=1)
    assert {"length", "rescore_ms", "calibrated_ms", "later_ms", "among_64_ms"} == {*row}
    assert min(row.values()) > 0
