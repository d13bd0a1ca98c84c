# SPDX-License-Identifier: Apache-2.0
"""What the processes of an engine on CPUs get by environment, and what the C library makes of it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest

from h2o_vllm.engine.cpu import environment

SPIN, GLIBC, AOT = (
    environment.spin_briefly, environment.allocate_by_glibc, environment.find_compiled_again
)  # fmt: skip


@pytest.mark.parametrize(
    ("prepare", "cores", "given", "added"),
    [
        (SPIN, 2, {}, {"GOMP_SPINCOUNT": environment.SPINS}),
        (SPIN, 5, {}, {}),
        (SPIN, 2, {"GOMP_SPINCOUNT": "7"}, {}),
        (SPIN, 2, {"OMP_WAIT_POLICY": "active"}, {}),
        *((GLIBC, 2, {name: "1"}, {}) for name in environment.MALLOC),
        # Inductor stores what is compiled.
        (AOT, 2, {}, {"VLLM_USE_AOT_COMPILE": "0"}),
        (AOT, 2, {"VLLM_USE_AOT_COMPILE": "1"}, {}),
        (AOT, 2, {"VLLM_FORCE_AOT_LOAD": "1"}, {}),
    ],
)
def test_what_the_user_has_set_wins(
    prepare: Callable[[dict[str, str]], None],
    cores: int,
    given: dict[str, str],
    added: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    variables = dict(given)
    prepare(variables)
    assert variables == given | added


ALLOCATE = """
import ctypes, platform
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for size in (16 << 20, 128 << 20):
    page = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(page, 1, size)
    print([line.split()[1] for line in open("/proc/self/smaps_rollup") if "AnonHuge" in line][0])
    libc.free(ctypes.c_void_p(page))
print([line.split()[1] for line in open("/proc/self/status") if "VmRSS" in line][0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_process_started_with_it_keeps_what_is_freed() -> None:
    """And knows all four names: glibc ignores those that it does not know."""
    variables = dict(os.environ)
    for name in environment.MALLOC:
        variables.pop(name, None)
    environment.allocate_by_glibc(variables)

    def kept(env: dict[str, str]) -> int:
        """KiB that are resident after 16 MiB and 128 MiB were freed."""
        done = subprocess.run(
            [sys.executable, "-c", ALLOCATE], env=env, capture_output=True, text=True, check=True
        )
        return int(done.stdout.split()[-1])

    plain = {name: value for name, value in variables.items() if name not in environment.MALLOC}
    assert kept(variables) > kept(plain) + (15 << 10)
