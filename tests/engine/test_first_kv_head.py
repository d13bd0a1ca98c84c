# SPDX-License-Identifier: Apache-2.0
"""Law 11 without a second process: which of the model's KV heads a rank says are its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from h2o_vllm.engine.worker import worker


@pytest.mark.parametrize(
    ("heads", "firsts"),
    [
        pytest.param(8, [0, 2, 4, 6], id="several-each"),
        pytest.param(4, [0, 1, 2, 3], id="one-each"),
    ],
)
def test_law11_each_rank_counts_its_heads_from_its_own_first(
    monkeypatch: pytest.MonkeyPatch, heads: int, firsts: list[int]
) -> None:
    one: Any = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        parallel_config=SimpleNamespace(tensor_parallel_size=len(firsts)),
    )
    found = []
    for rank in range(len(firsts)):
        monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        found.append(worker.EvictingWorker._first_kv_head(one))
    assert found == firsts
