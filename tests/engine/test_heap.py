# SPDX-License-Identifier: Apache-2.0
"""What a worker frees and allocates again is not taken from the kernel again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from h2o_vllm.engine.cpu.heap import keep_freed_memory

STEPS = """
import resource, sys
from h2o_vllm.engine.cpu.heap import keep_freed_memory
print(int(keep_freed_memory()))
import torch

def step():
    return [torch.ones(4 << 20) for _ in range(8)]

for _ in range(10):  # now and then the heap grows by one more tensor, until small things lie out of the way
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux'")
def test_freed_memory_is_kept() -> None:
    """Of 10 steps, of 8 tensors of 16 MiB each, next to no page is taken anew."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    run = subprocess.run(
        [sys.executable, "-c", STEPS], env=clean, text=True, capture_output=True, check=True
    )
    kept, pages = run.stdout.split()
    assert kept == "1" and int(pages) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1000000"),
    ],
)
def test_whoever_sets_malloc_is_obeyed(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()
