# SPDX-License-Identifier: Apache-2.0
"""What a CPU worker computes ahead of a first eviction changes nothing but its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_vllm.blocks.plan import Eviction, Upcoming
from h2o_vllm.calibration.features import Rotation
from h2o_vllm.calibration.file import Part
from h2o_vllm.engine.cpu import state as state_module
from h2o_vllm.engine.cpu.state import CPUState
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.policy.policy import Policy

LAYERS, BLOCKS, HEADS, BLOCK, SIZE = 5, 40, 2, 16, 16
RANKED = (7, 2, 11, 30, 5, 21, 9, 16)
POLICIES = (
    "predicted+value+end+key",
    "value+end+key",
    "predicted",
    "key",
    "value",
    "predicted+key",
)


def state_of(seed: int = 0) -> CPUState:
    gen = torch.Generator().manual_seed(seed)
    weights = torch.randn(LAYERS, HEADS, HEADS * SIZE * 3 // 2 + 1, generator=gen) / SIZE
    weights[..., -1] = -4.0
    shape = (BLOCKS, HEADS, BLOCK, 2 * SIZE)
    return CPUState(
        planes=torch.rand(2, LAYERS, BLOCKS, HEADS, BLOCK, generator=gen),
        kv_cache_group=0,
        first_head=0,
        kv_caches=[torch.randn(shape, generator=gen) for _ in range(LAYERS)],
        row_request_ids=list,
        calibration=Part(weights, Rotation(SIZE), 0, of_all_heads=False),
    )


def eviction_of(policy: str) -> Eviction:
    ranks = Policy.parse(policy, calibrated=True).indices()
    return Eviction("one", RANKED[5:], RANKED[:5], (), ranks, RANKED, fresh_from=48, seen=300)


def said(policy: str, step: int, steps: int = 16, name: str = "one") -> Upcoming:
    ranks = Policy.parse(policy, calibrated=True).indices()
    return Upcoming(name, ranks, RANKED, 48, step, steps)


def left(state: CPUState, policy: str) -> list[Tensor]:
    state.compact([eviction_of(policy)])
    return [state.scores, *state.kv_caches]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More would measure several layers at once, as many as they have heads to share."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [range(1, 17), range(1, 9), [5, 16], [1]], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_the_result_is_the_same_to_the_bit(policy: str, steps: list[int], *, shared: bool) -> None:
    """However many layers are known before: all, half, or none."""
    ahead, at_once = state_of(), state_of()
    if shared:
        ahead.sharing, at_once.sharing = {"one"}, {"one"}
    for step in steps:
        ahead.look_ahead([said(policy, step)])
    # What changes until the eviction.
    for state in (ahead, at_once):
        state.planes += torch.rand(state.planes.shape, generator=torch.Generator().manual_seed(9))
    assert_equal(left(ahead, policy), left(at_once, policy))


def test_ranks_add_up_each_layer_by_itself() -> None:
    """As gloo does, where the order of three ranks depends on a number's place in the tensor."""

    def add(sums: Tensor) -> None:
        flat = sums.view(-1)
        flat.mul_(1 + torch.arange(len(flat)) / len(flat))

    ahead, at_once = state_of(), state_of()
    for state in (ahead, at_once):
        assert state.calibration is not None
        state.calibration = replace(state.calibration, of_all_heads=True)
        state.add_ranks = add
    for step in range(1, 9):
        ahead.look_ahead([said("predicted+key", step)])
    assert_equal(left(ahead, "predicted+key"), left(at_once, "predicted+key"))


def test_many_threads_share_the_heads_of_several_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    state, layers = state_of(), []
    for step in range(1, 6):
        state.look_ahead([said("key", step, 5)])
        layers.append(state.ahead._found["one"].layers)
    assert layers == [0, 2, 2, 4, 5]


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_computed_twice(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer once, in equal shares; at the eviction nothing is left."""
    looked: list[int] = []

    def noting(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(caches: list[Tensor], *args: Any, **options: Any) -> Tensor:
            looked.append(len(caches))
            return kernel(caches, *args, **options)

        return noted

    for name in ("key_similarity", "value_distances", "predict"):
        monkeypatch.setattr(kernels, name, noting(getattr(kernels, name)))
    state = state_of()
    measures = sum(rank in ("predicted", "value", "key") for rank in policy.split("+"))
    for step in range(1, 11):
        state.look_ahead([said(policy, step, 10)])
        assert sum(looked) == measures * (LAYERS * step // 10)
    state.compact([eviction_of(policy)])
    assert sum(looked) == measures * LAYERS
    assert max(looked) == 1


@pytest.mark.parametrize("leave", ["release", "restart"])
def test_what_a_request_has_left_behind_is_forgotten(leave: str) -> None:
    """Its blocks had other tokens meanwhile."""
    policy, state, at_once = POLICIES[0], state_of(), state_of()
    state.look_ahead([said(policy, 16)])
    getattr(state, leave)(["one"])
    for one in (state, at_once):
        for cache in one.kv_caches:
            cache.neg_().add_(0.5)
    state.look_ahead([said(policy, 3)])
    assert_equal(left(state, policy), left(at_once, policy))


def test_what_was_computed_of_others_is_not_used() -> None:
    policy, state, at_once = POLICIES[0], state_of(), state_of()
    other = Upcoming("one", said(policy, 16).ranks, RANKED[:-1], 48, 16, 16)
    state.look_ahead([other])
    assert_equal(left(state, policy), left(at_once, policy))
    assert not state.ahead._found


def test_there_is_room_for_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, at_once = POLICIES[0], state_of()
    # Three measures and two places of 128 tokens, of 5 layers and 2 heads.
    one = 5 * 4 * 128 * 10
    monkeypatch.setattr(state_module, "_AHEAD_BYTES", 0)
    state = state_of()
    assert sum(cache.nbytes for cache in state.kv_caches) // 32 == one
    for name in ("other", "one"):
        state.look_ahead([said(policy, 1, name=name)])
    assert [*state.ahead._found] == ["other"]
    found = state.ahead._found["other"]
    found.advance(LAYERS)
    held = [*found._found.values(), *found._places.values()]
    assert sum(tensor.nbytes for tensor in held) == found.nbytes == one
    assert_equal(left(state, policy), left(at_once, policy))
