# SPDX-License-Identifier: Apache-2.0
"""What has been loaded moves to huge pages: which memory that is, and that no byte of it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h2o_vllm.engine.cpu import huge
from h2o_vllm.engine.cpu.huge import LARGE, collapse, on_small_pages

MIB = 1 << 20


def entry(
    size: int,
    resident: int,
    huge_pages: int = 0,
    permissions: str = "rw-p",
    inode: int = 0,
    name: str = "",
) -> str:
    return (
        f"7f0000000000-{0x7F0000000000 + size:x} {permissions} 00000000 00:00 {inode} {name}\n"
        f"Size: {size >> 10} kB\nRss: {resident >> 10} kB\n"
        f"AnonHugePages: {huge_pages >> 10} kB\nVmFlags: rd wr mr\n"
    )


FOUND = [(0x7F0000000000, LARGE)]


@pytest.mark.parametrize(
    ("smaps", "expected"),
    [
        (entry(LARGE, LARGE), FOUND),
        (entry(LARGE, LARGE, name="[heap]"), FOUND),
        (entry(LARGE, LARGE, name="[stack]"), []),
        (entry(LARGE, LARGE, inode=7, name="/a file"), []),
        (entry(LARGE, LARGE, inode=7, name="/a file (deleted)"), []),
        (entry(LARGE, LARGE, permissions="r--p"), []),
        (entry(LARGE, LARGE, permissions="rw-s"), []),
        (entry(LARGE - MIB, LARGE - MIB), []),
        (entry(LARGE, LARGE - 2 * MIB), []),
        (entry(LARGE, LARGE, huge_pages=LARGE), []),
        (entry(LARGE, LARGE, huge_pages=2 * MIB), []),
        (entry(9 * LARGE, 9 * LARGE, huge_pages=8 * LARGE), [(0x7F0000000000, 9 * LARGE)]),
        (entry(LARGE, LARGE, inode=7, name="/a file") + entry(LARGE, LARGE), FOUND),
        ("", []),
    ],
    ids=str,
)
def test_large_memory_of_no_file_that_is_in_use(
    smaps: str, expected: list[tuple[int, int]]
) -> None:
    assert list(on_small_pages(smaps)) == expected


def huge_bytes() -> int:
    """Of all memory of this process: Linux reports neighbours in one, so that no tensor has a figure."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (found,) = (line.split() for line in rollup if line.startswith("AnonHugePages:"))
    return int(found[1]) << 10


def linux_collapses() -> bool:
    release = Path("/proc/sys/kernel/osrelease").read_text().split(".")
    by_request = huge.ENABLED.exists() and "[madvise]" in huge.ENABLED.read_text()
    return by_request and (int(release[0]), int(release[1].split("-")[0])) >= (6, 1)


@pytest.mark.skipif(
    not linux_collapses(), reason="this Linux moves nothing to huge pages by request (6.1, madvise)"
)
def test_what_is_in_use_moves_and_stays_what_it_is() -> None:
    """Also beside what moved before: Linux puts the two, soon mostly huge pages, into one range."""
    held = []
    for _ in range(5):
        held.append(torch.arange(LARGE, dtype=torch.int32))
        before = huge_bytes()
        assert collapse() >= 3 * LARGE
        assert huge_bytes() - before >= 3 * LARGE
    assert all(torch.equal(weights, torch.arange(LARGE, dtype=torch.int32)) for weights in held)
    assert collapse() < LARGE, "what has moved is left alone"


def test_nothing_moves_where_the_operator_wants_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(huge, "ENABLED", tmp_path / "enabled")
    monkeypatch.setattr(huge, "SMAPS", tmp_path / "unread")
    assert collapse() == 0


def test_a_kernel_without_huge_pages_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge, "ENABLED", tmp_path / "missing")
    assert collapse() == 0
