# SPDX-License-Identifier: Apache-2.0
"""What the processes of an engine on CPUs get by environment, and what the C library makes of it."""

import os
import platform

import pytest

from h2o_vllm.engine.cpu import environment
from tests.processes import python

OURS = {
    "GOMP_SPINCOUNT": environment.SPINS,
    "GLIBC_TUNABLES": environment.TUNABLES,
    "VLLM_USE_AOT_COMPILE": "0",
}


@pytest.mark.parametrize(
    ("cores", "given", "left_out"),
    [
        (2, {}, ""),
        (5, {}, "GOMP_SPINCOUNT"),
        *((2, {name: "7"}, "GOMP_SPINCOUNT") for name in environment.SPINNING),
        *((2, {name: "1"}, "GLIBC_TUNABLES") for name in environment.MALLOC),
        *((2, {name: "1"}, "VLLM_USE_AOT_COMPILE") for name in environment.AOT),
    ],
)
def test_what_the_user_has_set_wins(
    cores: int, given: dict[str, str], left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    variables = dict(given)
    environment.set_defaults(variables)
    assert variables == {name: OURS[name] for name in OURS if name != left_out} | given


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
    environment.set_defaults(variables)

    def kept(env: dict[str, str]) -> int:
        """KiB that are resident after 16 MiB and 128 MiB were freed."""
        return int(python("-c", ALLOCATE, env=env).stdout.split()[-1])

    plain = {name: value for name, value in variables.items() if name not in environment.MALLOC}
    assert kept(variables) > kept(plain) + (15 << 10)
