# SPDX-License-Identifier: Apache-2.0
"""Law 11 without a second process: which of the model's layers and KV heads a worker says are its own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from h2o_vllm.engine.model_shard import ModelShard
from h2o_vllm.engine.support.refusal import evictable_kv_heads
from h2o_vllm.errors import ConfigError
from h2o_vllm.policy.fresh import head_number


@pytest.mark.parametrize(
    ("heads", "firsts", "holders"),
    [
        pytest.param(8, [0, 2, 4, 6], [True] * 4, id="several-each"),
        pytest.param(4, [0, 1, 2, 3], [True] * 4, id="one-each"),
        pytest.param(2, [0, 0, 1, 1], [True, False] * 2, id="copies"),
        pytest.param(1, [0, 0, 0, 0], [True, False, False, False], id="copies-of-one"),
    ],
)
def test_law11_each_rank_counts_its_heads_from_its_own_first(
    heads: int, firsts: list[int], holders: list[bool]
) -> None:
    own, told = max(1, heads // 4), [(5, {"norm": 1.0})]
    found = [ModelShard.of(rank, 4, heads, own, 0, told) for rank in range(4)]
    assert [one.first_head for one in found] == firsts
    assert [one.is_first_copy for one in found] == holders
    assert [one.first_number for one in found] == firsts
    assert all(one.heads == heads and one.own == slice(0, 5) for one in found)


def test_law11_each_stage_counts_its_layers_from_its_own_first() -> None:
    told = [(3, {"b": 1.5, "d": 4.0}), (2, {"a": 2.0}), (2, {"c": 3.0})]
    found = [ModelShard.of(1, 2, 4, 2, stage, told) for stage in range(3)]
    assert [one.own for one in found] == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert [one.first_number for one in found] == [head_number(at, 2) for at in (0, 3, 5)]
    for one in found:
        # As one process has them, by name.
        assert one.layers == 7 and one.norms.tolist() == [2.0, 1.5, 3.0, 4.0]
        assert one.norms.dtype == torch.float32


def test_law09_a_rank_with_other_heads_than_it_should_have_does_not_start() -> None:
    with pytest.raises(ConfigError, match="expected 2 of the model's 8 KV heads on each of 4"):
        ModelShard.of(0, 4, 8, 1, 0, [(2, {})])


def test_heads_are_those_of_full_attention() -> None:
    """Gemma 4's layers with windows have more."""
    each = [SimpleNamespace(total_num_kv_heads=count) for count in (8, 8, 2, 8, 8, 2)]
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    model: Any = SimpleNamespace(
        model_arch_config=each,
        hf_text_config=SimpleNamespace(layer_types=kinds),
        get_total_num_kv_heads=lambda: 8,
    )
    assert evictable_kv_heads(model) == 2
    model.hf_text_config = SimpleNamespace()
    assert evictable_kv_heads(model) == 8
