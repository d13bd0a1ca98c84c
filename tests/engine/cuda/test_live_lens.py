# SPDX-License-Identifier: Apache-2.0
"""What the host knows of live lengths: grids, splits and launches follow them, not the tokens seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from h2o_vllm.engine.cuda.batch import ScoredBatch
from h2o_vllm.engine.cuda.variants import Variant
from h2o_vllm.kernels import triton as kernels
from h2o_vllm.kernels.triton import launching
from tests.engine.cuda.fake_gpu import fake_gpu


def test_vllm_gets_the_live_length_of_its_longest_row(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By it FlashAttention splits rows. The rows that our kernels attend do not count."""
    with fake_gpu(model_dir, 120, kv_min_tokens=32, caching=False) as (rig, gpu):
        build, told = gpu.builder.build, []
        through_triton = launching.through_triton

        def only_tables(kernel: Any, *given: Any) -> None:
            if kernel.fn.__name__ == "_compact_tables":
                through_triton(kernel, *given)

        def checked(_: int, common: Any, **options: Any) -> Any:
            batch = build(0, common, **options)
            if isinstance(batch, ScoredBatch) and batch.stock is not None:
                longest = int(batch.stock.seq_lens.max())
                assert batch.stock.max_seq_len == max(longest, common.max_query_len)
                told.append((batch.variant, common.max_seq_len, batch.stock.max_seq_len))
            return batch

        monkeypatch.setattr(launching, "through_triton", only_tables)
        monkeypatch.setattr(gpu, "forward", lambda *_, **__: None)
        monkeypatch.setattr(gpu.builder, "build", checked)
        rig.add("scored", [1] * 250, {"kv_budget": 0.25}, max_tokens=40)
        rig.add("unscored", [2] * 250, {"kv_budget": 0.25, "kv_policy": "random"}, max_tokens=60)
        while rig.scheduler.has_unfinished_requests():
            if len(told) == 20:
                rig.add("full", [3] * 40, max_tokens=30)
            gpu.worker.execute_model(rig.step())
            if len(told) == 21:
                # Takes a slot that had holes.
                rig.add("next", [4] * 40, max_tokens=50)
    assert {variant for variant, _, _ in told} == {Variant.MIXED}
    assert min(live / seen for _, seen, live in told) < 0.4


def test_the_host_knows_whether_a_plan_cuts_rows() -> None:
    """Then a step outside of CUDA graphs need not launch what joins pieces."""
    chance, found = np.random.default_rng(0), []
    for number in range(40):
        tokens, spare = int(chance.integers(20, 900)), int(chance.integers(4, 40))
        lengths = chance.integers(0, tokens, size=int(chance.integers(1, 50))).astype(np.int32)
        if number % 3 == 0:
            lengths[0] *= 8
        workspace = kernels.DecodeWorkspace(64, 1 << 15, 2, 1, torch.float16, 64, "cpu", spare)
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
        lens = torch.from_numpy(lengths)
        workspace.plan(starts, lens, torch.zeros_like(lens), lens[:, None], 16)
        first = workspace.pieces[0]
        cut = first[0] >= 0 and first[7] > 0
        assert workspace.cuts(lengths) == cut
        found.append(bool(cut))
    assert 5 < sum(found) < 35
