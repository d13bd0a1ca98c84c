# SPDX-License-Identifier: Apache-2.0
"""The KV pool's memory: zero, taken by a thread, and never changed by it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
)
from vllm.v1.worker.utils import allocate_kv_cache

from h2o_vllm.engine.cpu import pages
from h2o_vllm.engine.cpu.pages import LARGE, ZeroPages, populate

PAGE = 4096


def resident() -> int:
    """Bytes of memory that this process has been given."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What would be taken; nothing is, until a test does."""
    waiting: list[torch.Tensor] = []
    monkeypatch.setattr(pages, "populate", waiting.append)
    return waiting


def test_vllms_own_allocation_takes_no_memory_and_is_zero(held: list[torch.Tensor]) -> None:
    """Fails if vLLM allocates its pool in another way: then the start writes all of it again."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    blocks = 4 * LARGE // spec.page_size_bytes
    size = blocks * spec.page_size_bytes
    tensor = KVCacheTensor(
        size=size, layers=["l"], layer_stride=size, block_stride=spec.page_size_bytes
    )
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(["l"], spec)],
    )
    before = resident()
    with ZeroPages():
        cache = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)["l"]
    assert resident() - before < LARGE
    assert [pool.nbytes for pool in held] == [size]
    assert cache.data_ptr() == held[0].data_ptr()
    assert not cache[::7].any() and not cache[-1].any()
    cache[-1] = 1
    assert cache[-1].all() and not cache[-2].any()


def test_pages_are_huge_where_linux_has_such(held: list[torch.Tensor]) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this Linux has no huge pages on demand")
    with ZeroPages():
        pool = torch.zeros(LARGE, dtype=torch.int8)
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split()[0].split("-")
        if len(bounds) == 2 and not line.startswith("VmFlags"):
            inside = int(bounds[0], 16) <= pool.data_ptr() < int(bounds[1], 16)
        elif line.startswith("VmFlags") and inside:
            flags = line
    assert " hg" in flags


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (LARGE - 1, {"dtype": torch.int8}),
        (LARGE, {"dtype": torch.uint8}),
        ((LARGE, 1), {"dtype": torch.int8}),
        (LARGE, {"dtype": torch.int8, "pin_memory": False}),
        (LARGE, {"dtype": torch.int8, "device": "meta"}),
    ],
)
def test_other_zeros_are_torchs(
    size: Any, options: dict[str, Any], held: list[torch.Tensor]
) -> None:
    with ZeroPages():
        found = torch.zeros(size, **options)
    expected = torch.zeros(size, **options)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.device == expected.device
    assert held == []


def test_pages_are_taken_while_others_write_and_nothing_changes(held: list[torch.Tensor]) -> None:
    with ZeroPages():
        pool = torch.zeros(2 * LARGE + PAGE, dtype=torch.int8)
    before, taken = resident(), []
    taker = threading.Thread(target=lambda: taken.append(populate(pool)))
    taker.start()
    pool[:: 64 * PAGE] = 5
    taker.join()
    (count,) = taken
    if count == 0:
        pytest.skip("this Linux cannot take pages without writing them")
    assert count == pool.nbytes
    assert resident() - before > 2 * LARGE - PAGE
    assert pool.sum(dtype=torch.int64) == 5 * len(pool[:: 64 * PAGE])


def test_who_takes_pages_gives_way_to_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    found, done = [], threading.Event()

    def note(pool: torch.Tensor) -> None:
        del pool
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        done.set()

    monkeypatch.setattr(pages, "populate", note)
    usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
    with ZeroPages():
        torch.zeros(LARGE, dtype=torch.int8)
    assert done.wait(10)
    assert found == [pages.NICE]
    assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == usual


def test_refused_pages_are_left_for_later(
    held: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ZeroPages():
        pool = torch.zeros(LARGE, dtype=torch.int8)
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", 9999)
    assert populate(pool) == 0
    pool[-1] = 1
    assert pool[-1] == 1
