# SPDX-License-Identifier: Apache-2.0
"""A CPU worker runs each of our kernels before it serves: none is built by somebody's first request."""

from functools import partial
from typing import Any

import pytest
import torch

from h2o_vllm.engine.cpu.state import CPUState
from h2o_vllm.kernels import cpu as kernels

EACH_STEP = {"attend_decode", "attend_prompt", "reset_scores"}


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels as they are called; they run as well."""
    called: list[str] = []

    def note(name: str, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return kernel(*args, **kwargs)

    for name in kernels.KERNELS:
        monkeypatch.setattr(kernels, name, partial(note, name, getattr(kernels, name)))
    return called


def state(kv_heads: int = 2, size: int = 16) -> CPUState:
    caches = [torch.zeros(4, kv_heads, 32, 2 * size) for _ in range(3)]
    return CPUState(
        planes=torch.zeros(2, 3, 4, kv_heads, 32), kv_cache_group=0, first_head=0,
        kv_caches=caches, row_request_ids=list,
    )  # fmt: skip


def test_every_kernel_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called = noted(monkeypatch)
    state().warm_up(num_heads=4)
    assert set(called) == kernels.KERNELS
    assert EACH_STEP < set(called)


def test_it_leaves_the_cache_alone() -> None:
    warm = state()
    for cache in warm.kv_caches:
        cache.uniform_(generator=torch.Generator().manual_seed(0))
    before = [cache.clone() for cache in warm.kv_caches]
    warm.warm_up(num_heads=4)
    assert all(torch.equal(*pair) for pair in zip(before, warm.kv_caches, strict=True))
    assert not warm.planes.any()
