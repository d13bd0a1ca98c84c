# SPDX-License-Identifier: Apache-2.0
"""The checks refuse what would make a kernel read or write outside its tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.cpu.checks import check_cache
from tests.kernels.cpu import checks
from tests.kernels.cpu.cases import make_batch


def cache(
    blocks: int = 4, heads: int = 2, block_size: int = 32, size: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Tensor:  # fmt: skip
    return torch.zeros(blocks, heads, block_size, 2 * size, dtype=dtype)


def test_a_good_cache_passes() -> None:
    check_cache([cache(), cache()], torch.zeros(2, 4, 2, 32), num_heads=6)


@pytest.mark.parametrize(
    ("caches", "scores", "heads", "message"),
    [
        ([], torch.zeros(0, 4, 2, 32), 6, "at least one"),
        ([cache(dtype=torch.float64)], torch.zeros(1, 4, 2, 32), 6, "float64"),
        ([cache(block_size=24)], torch.zeros(1, 4, 2, 24), 6, "multiples of 16"),
        ([cache()], torch.zeros(1, 4, 2, 32), 5, "evenly"),
        ([cache(), cache(blocks=5)], torch.zeros(2, 4, 2, 32), 6, "one shape"),
        ([cache().transpose(0, 1)], torch.zeros(1, 2, 4, 32), 4, "contiguous"),
        ([cache()], torch.zeros(2, 4, 2, 32), 6, "scores must be"),
        ([cache()], torch.zeros(1, 4, 2, 32).half(), 6, "scores must be"),
    ],
)
def test_a_bad_cache_is_refused(
    caches: list[Tensor], scores: Tensor, heads: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cache(caches, scores, heads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"query": torch.zeros(2, 6, 32)}, "query must be"),
        ({"query": torch.zeros(2, 6, 64).half()}, "query is"),
        ({"query": torch.zeros(2, 64, 6).transpose(1, 2)}, "contiguous"),
        ({"scores": torch.zeros(3, 2, 32)}, "scores must be"),
        ({"seq_lens": torch.tensor([40, 70])}, "int32"),
        ({"seq_lens": torch.tensor([40, 7000], dtype=torch.int32)}, "does not fit"),
        ({"block_table": torch.full((2, 9), 99, dtype=torch.int32)}, "outside"),
        ({"block_table": torch.zeros((2, 9), dtype=torch.int32)}, "outside"),
    ],
)
def test_a_bad_batch_is_refused(change: dict[str, Tensor], message: str | None) -> None:
    batch = make_batch([40, 70])
    paged = batch.paged()._replace(**change)
    if message is None:
        checks.check_batch(paged, batch.rows)
        return
    with pytest.raises(ValueError, match=message):
        checks.check_batch(paged, batch.rows)


def test_more_scored_rows_than_listed_ones_are_refused() -> None:
    batch = make_batch([40, 70])
    for scored in (0, 2):
        checks.check_batch(batch.paged(), batch.rows, None, scored)
    for scored in (-1, 3):
        with pytest.raises(ValueError, match="scored must be 0 to 2"):
            checks.check_batch(batch.paged(), batch.rows, None, scored)


def test_a_softmax_that_cannot_be_is_refused() -> None:
    batch = make_batch([40, 70]).paged()
    checks.check_softmax(batch, 0.0, None)
    checks.check_softmax(batch, 50.0, torch.zeros(6))
    for softcap in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="softcap must be"):
            checks.check_softmax(batch, softcap, None)
    for sinks in (torch.zeros(2), torch.zeros(6).half(), torch.zeros(12)[::2]):
        with pytest.raises(ValueError, match="sinks must be"):
            checks.check_softmax(batch, 0.0, sinks)


@pytest.mark.parametrize(
    ("heavy", "doomed"), [([0], [1]), ([1], [9]), ([1, 1], [2]), ([1, 2], [3, 2])]
)
def test_a_bad_eviction_is_refused(heavy: list[int], doomed: list[int]) -> None:
    checks.check_eviction(torch.tensor([1, 2]), torch.tensor([3, 3]), 9)
    with pytest.raises(ValueError, match="block"):
        checks.check_eviction(torch.tensor(heavy), torch.tensor(doomed), 9)
