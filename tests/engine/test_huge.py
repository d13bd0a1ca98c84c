# SPDX-License-Identifier: Apache-2.0
"""What has been loaded moves to huge pages: which memory that is, and that no byte of it changes."""

from __future__ import annotations

import mmap
import multiprocessing
from pathlib import Path

import pytest
import torch

from h2o_vllm.engine.cpu import huge
from h2o_vllm.engine.cpu.huge import HUGE, LARGE, collapse, on_small_pages, pages_in_use
from tests.engine.test_pages import resident

MIB = 1 << 20
START = 1 << 44
"""Between programs and what Linux maps: nothing lies there."""


def entry(
    size: int,
    resident: int,
    huge_pages: int = 0,
    permissions: str = "rw-p",
    inode: int = 0,
    name: str = "",
) -> str:
    return (
        f"{START:x}-{START + size:x} {permissions} 00000000 00:00 {inode} {name}\n"
        f"Size: {size >> 10} kB\nRss: {resident >> 10} kB\n"
        f"AnonHugePages: {huge_pages >> 10} kB\nVmFlags: rd wr mr\n"
    )


FOUND = [(START, LARGE)]


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
        (entry(9 * LARGE, LARGE), [(START, 9 * LARGE)]),
        (entry(LARGE, LARGE, huge_pages=LARGE), []),
        (entry(LARGE, LARGE, huge_pages=2 * MIB), []),
        (entry(9 * LARGE, 9 * LARGE, huge_pages=8 * LARGE), [(START, 9 * LARGE)]),
        (entry(LARGE, LARGE, inode=7, name="/a file") + entry(LARGE, LARGE), FOUND),
        ("", []),
    ],
    ids=str,
)
def test_large_memory_of_no_file(smaps: str, expected: list[tuple[int, int]]) -> None:
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


def move_and_look() -> None:
    held, untouched = [], []
    for _ in range(2):
        held.append(torch.arange(LARGE, dtype=torch.int32))
        untouched.append(torch.empty(20 * LARGE, dtype=torch.int8))
        before, resident_before = huge_bytes(), resident()
        assert collapse() >= 3 * LARGE
        assert huge_bytes() - before >= 3 * LARGE
        assert resident() - resident_before < LARGE, "what nobody has touched takes no memory"
    assert all(torch.equal(weights, torch.arange(LARGE, dtype=torch.int32)) for weights in held)
    before = huge_bytes()
    collapse()
    assert huge_bytes() - before < LARGE, "what has moved is left alone"


@pytest.mark.slow
@pytest.mark.skipif(
    not linux_collapses(), reason="this Linux moves nothing to huge pages by request (6.1, madvise)"
)
def test_what_is_in_use_moves_and_stays_what_it_is() -> None:
    """Beside what moved before and what nobody has touched: Linux puts them all into one range.

    In a process of its own: where an engine has been, memory that was freed has moved already.
    """
    process = multiprocessing.get_context("spawn").Process(target=move_and_look)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_huge_pages_of_a_range_that_are_in_use() -> None:
    """Of five, between them ends that are nobody's: all of one, half of one, none."""
    size = 6 * HUGE
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.int8)
    first = -(-memory.data_ptr() // HUGE) * HUGE
    begin = first - memory.data_ptr()
    memory[begin : begin + HUGE] = 1
    memory[begin + HUGE : begin + HUGE + HUGE // 2] = 1
    memory[begin + 3 * HUGE : begin + 4 * HUGE] = 1
    found = list(pages_in_use(memory.data_ptr(), size))
    assert found == [first, first + 3 * HUGE]
    assert list(pages_in_use(memory.data_ptr() + 5, HUGE)) == []


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


def test_a_range_that_is_gone_keeps_no_other_from_moving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="mincore"):
        list(pages_in_use(START, LARGE))
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "smaps").write_text(entry(LARGE, LARGE))
    monkeypatch.setattr(huge, "ENABLED", tmp_path / "enabled")
    monkeypatch.setattr(huge, "SMAPS", tmp_path / "smaps")
    assert collapse() == 0
