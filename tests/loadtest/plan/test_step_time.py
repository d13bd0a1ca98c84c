# SPDX-License-Identifier: Apache-2.0
"""Step times against numbers by hand, and a fit against costs that are known."""

from __future__ import annotations

import dataclasses
import random

import pytest

from loadtest.plan.fit import Linear, MeasuredStep, fit, residual, typical_steps
from loadtest.plan.gpus import GPU, GPUS
from loadtest.plan.memory import pool_blocks
from loadtest.plan.roofline import Efficiency, Roofline
from loadtest.plan.shapes import SHAPES, ModelShape, ShapeError, load_shape, shape_of
from loadtest.plan.work import FEATURES, Work

ALL = Efficiency(compute=1, memory=1, link=1, reduce_s=0, step_s=0, request_s=0)
# 2 layers of 4 * 8 * (2 + 1) * 4 / 2 = 192 and 3 * 8 * 16 = 384 parameters, 80 in the output.
TINY = ModelShape("tiny", 2, 8, 16, 2, 1, 4, 10, False, 1024)
GPU_1 = GPU(
    "one", flops=1e6, bandwidth=1e6, memory=1e9, processors=1, link=1e5, dollars=1, source="made up"
)
FAST_MEMORY = dataclasses.replace(GPU_1, bandwidth=1e12)
FAST_COMPUTE = dataclasses.replace(GPU_1, flops=1e12)


def test_published_parameter_counts() -> None:
    assert SHAPES["8b"].parameters == pytest.approx(8.03e9, rel=1e-3)
    assert SHAPES["70b"].parameters == pytest.approx(70.6e9, rel=1e-3)
    # 128 KiB per token: 32 layers of 8 heads of 128, keys and values, two bytes each.
    assert SHAPES["8b"].kv_bytes(2) == 131_072
    assert [SHAPES["8b"].kv_bytes(2, gpus) for gpus in (2, 8, 16)] == [65_536, 16_384, 16_384]


def test_parameters_by_hand() -> None:
    assert TINY.layer_parameters == 2 * (192 + 384)
    assert TINY.parameters == 1152 + 2 * 80
    assert dataclasses.replace(TINY, tied=True).parameters == 1152 + 80


def test_the_operations_of_a_prompt() -> None:
    roofline = Roofline(TINY, FAST_MEMORY, efficiency=ALL)
    work = Work(prompt_tokens=3, pairs=6, outputs=1)
    linear = 2 * (1152 * 3 + 80)
    # Two operations for each of QK and PV, in 2 layers of 2 heads of 4.
    attention = 2 * 2 * 2 * 2 * 4 * 6
    assert roofline.seconds(work) == pytest.approx((linear + attention) / 1e6, rel=1e-4)
    scored = dataclasses.replace(work, pairs=0, scored_pairs=6)
    assert roofline.attention(scored) == pytest.approx(1.5 * attention / 1e6, rel=1e-4)


def test_the_bytes_of_decodes() -> None:
    roofline = Roofline(TINY, FAST_COMPUTE, efficiency=ALL)
    work = Work(decodes=2, context=100, outputs=2)
    weights = 2 * (1152 + 80)
    activations = 2 * 2 * (8 * 8 + 4 * 16) * 2
    # Keys and values of one head of 4 in 2 layers, two bytes each.
    kv = 100 * 2 * 2 * 4 * 2
    assert roofline.seconds(work) == pytest.approx((weights + activations + kv) / 1e6, rel=1e-4)
    scored = dataclasses.replace(work, context=0, scored_context=100)
    assert roofline.attention(scored) == pytest.approx((kv + 100 * 2 * 4 * 2) / 1e6, rel=1e-4)


def test_two_gpus_halve_the_work_and_reduce() -> None:
    work = Work(prompt_tokens=10, pairs=55, decodes=4, context=400, outputs=4)
    one, two = (
        Roofline(dataclasses.replace(TINY, kv_heads=2), GPU_1, gpus, efficiency=ALL)
        for gpus in (1, 2)
    )
    assert two.linear(work) == pytest.approx(one.linear(work) / 2)
    assert two.attention(work) == pytest.approx(one.attention(work) / 2)
    assert one.all_reduce(work) == 0
    # Two per layer; of two GPUs each sends all of its 14 x 8 activations once.
    assert two.all_reduce(work) == pytest.approx(2 * 2 * 14 * 8 * 2 / 1e5)
    with pytest.raises(
        ShapeError, match=r"--tensor-parallel: got 3, wanted a divisor of the 2 heads"
    ):
        Roofline(TINY, GPU_1, 3)


def test_efficiency_and_what_a_step_costs_beside() -> None:
    work = Work(prompt_tokens=1000, pairs=500_500, outputs=1)
    full = Roofline(SHAPES["8b"], GPUS["h100"], efficiency=ALL).seconds(work)
    half = dataclasses.replace(ALL, compute=0.5, step_s=0.25, request_s=0.5)
    assert Roofline(SHAPES["8b"], GPUS["h100"], efficiency=half).seconds(work) == pytest.approx(
        2 * full + 0.75
    )


def test_a_pool_is_what_the_weights_leave() -> None:
    gpu = GPUS["h100"]
    stock, ours = (
        pool_blocks(SHAPES["8b"], gpu, 16, 8192, scored=scored) for scored in (False, True)
    )
    # 0.92 x 79.6 GiB - 15.0 of weights - 2 reserved - 0.7 of activations, 128 KiB a token.
    assert stock * 16 / 1024 * 128 / 1024 == pytest.approx(0.92 * 79.65 - 14.96 - 2 - 0.69, abs=0.1)
    assert ours / stock == pytest.approx(4096 / (4096 + 2 * 32), rel=1e-3)
    with pytest.raises(
        ShapeError, match=r"--tensor-parallel 1: the weights of 70b, 131 GiB of each GPU"
    ):
        pool_blocks(SHAPES["70b"], gpu, 16, 8192)
    assert pool_blocks(SHAPES["70b"], gpu, 16, 8192, tensor_parallel=4) * 16 > 100_000


def random_steps(linear: Linear, noise: float = 0.0) -> list[MeasuredStep]:
    source = random.Random(0)
    steps = []
    for _ in range(200):
        work = Work(*(source.choice((0, source.randrange(2000))) for _ in FEATURES))
        steps.append(MeasuredStep(work, linear.seconds(work) * (1 + noise * source.uniform(-1, 1))))
    return steps


KNOWN = Linear(0.01, (1e-3, 2e-3, 3e-6, 0.0, 5e-5, 4e-5, 0.0, 1e-4))


def test_a_fit_finds_the_costs() -> None:
    dearer = dataclasses.replace(KNOWN, constant=0.03)
    stock, ours = fit(random_steps(KNOWN), random_steps(dearer))
    assert stock.constant == pytest.approx(KNOWN.constant, rel=1e-4)
    assert ours.constant == pytest.approx(dearer.constant, rel=1e-4)
    assert stock.costs == ours.costs == pytest.approx(KNOWN.costs, rel=1e-4, abs=1e-9)


def test_rounds_that_are_alike_count_by_their_medians() -> None:
    works = [Work(decodes=n) for n in (1, 2)]
    rounds = [
        [MeasuredStep(work, seconds) for work, seconds in zip(works, times, strict=True)]
        for times in ((1.0, 5.0), (9.0, 4.0), (2.0, 6.0))
    ]
    assert [step.seconds for step in typical_steps(rounds)] == [2.0, 5.0]
    assert [step.work for step in typical_steps(rounds)] == works
    rounds[1] = rounds[1][:1]
    assert len(typical_steps(rounds)) == 5


def test_a_fit_has_no_negative_cost_and_says_its_error() -> None:
    falling = dataclasses.replace(KNOWN, costs=(*KNOWN.costs[:3], -2e-6, *KNOWN.costs[4:]))
    steps = [step for step in random_steps(falling, noise=0.1) if step.seconds > 0]
    found, _ = fit(steps, [])
    assert found.costs[3] == 0 and min(found.costs) >= 0 < found.constant
    error = residual(found, steps)
    assert 0 < error.typical < error.worst < 0.3 and abs(error.total) < 0.05


def test_features_that_no_step_has_cost_nothing() -> None:
    steps = [MeasuredStep(Work(decodes=n), 0.01 + 0.002 * n) for n in range(1, 9)]
    assert fit(steps, [])[0].seconds(Work(decodes=20, ranked=5)) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="no steps"):
        fit([], [])


CONFIG = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_a_config_is_read() -> None:
    shape = shape_of(CONFIG, "135m")
    assert shape.parameters == pytest.approx(134.5e6, rel=1e-3)
    assert (shape.head_size, shape.kv_heads) == (64, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 8}, r"--model: x has experts \(num_local_experts\)"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"hidden_size": None}, "the config.json of x lacks hidden_size"),
    ],
)
def test_other_models_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        shape_of(CONFIG | change, "x")


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ShapeError, match="--model: got 'nowhere', wanted 8b, 70b, or a directory"):
        load_shape("nowhere")
