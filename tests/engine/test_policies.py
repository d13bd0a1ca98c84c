# SPDX-License-Identifier: Apache-2.0
"""Every policy on the real engine: one row of the matrix each, the laws in the columns."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_vllm.calibration.file import Calibration
from tests.engine.conftest import BLOCK_SIZE, FLOOR, Engine
from tests.engine.fidelity import Seen, assert_answer, one_thread, positions, run_to_the_end
from tests.engine.outputs import check_mix, report_of
from tests.reference.policies import PolicyModel, load
from tests.served import SERVED, policy_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OTHERS = ("attention", "window", "random")
"""Kept sets: ``test_law04_fidelity.py``; preemptions and other batches: ``test_laws_tokens.py``."""
SIZES = {
    "mean": (0.5, 260), "value": (0.25, 250), "end": (1.0, 530), "key": (0.0, 200), "predicted": (0.1, 540),
}  # fmt: skip
KEPT = {
    name: SIZES.get(name, (policy_of(name).recent, 530)) for name in SERVED if name not in OTHERS
}
"""kv_recent, prompt tokens (chunks have 512)."""
BOUNDED = ("attention", *(policy for policy in KEPT if policy_of(policy).may_bound))
PROTECTING = ("attention", "mean", "window", "random")
STEPS = 36
"""Generated tokens: enough for an eviction after the first one."""
NEARLY_TIED = 1e-4
"""Of two scores, relative to one of them; see :func:`assert_keeps_as`."""


@pytest.fixture(scope="module")
def plain_model(model_dir: str) -> torch.nn.Module:
    return load(model_dir)


def cases() -> Iterator[tuple[dict[str, Any], int]]:
    """Fields and tokens of the prompt. What is protected or delayed does not depend on who ranks."""
    for row, (policy, (recent, length)) in enumerate(KEPT.items()):
        more = {"kv_protect": 50, "kv_delay": 2} if row % 2 else {"kv_protect": 0, "kv_delay": 0}
        yield {"kv_budget": 0.2, "kv_policy": policy, "kv_recent": recent, **more}, length
    for row, policy in enumerate(BOUNDED):
        recent, _ = KEPT.get(policy, (0.5, 0))
        # A budget of 1 keeps what the bound has left.
        more = (
            {"kv_budget": 1.0, "kv_protect": 50} if row % 2 else {"kv_budget": 0.2, "kv_protect": 0}
        )
        yield {"kv_policy": policy, "kv_recent": recent, "kv_prefill_tokens": 384, **more}, 545


@pytest.mark.parametrize(("asked", "length"), cases(), ids=str)
def test_the_kept_set_equals_that_of_a_plain_model(
    clean: Engine,
    plain_model: torch.nn.Module,
    text_tokens: list[int],
    calibration: str,
    asked: dict[str, Any],
    length: int,
) -> None:
    """Law 4. Evictions of a bounded prompt are few: each one meets near ties, which rounding decides."""
    bound = asked.get("kv_prefill_tokens", 0)
    prompt = text_tokens[400 if bound else 300 :][:length]
    asked = {**asked, "kv_heads": "equal"}
    model = model_of(plain_model, asked, calibration)
    assert_kept_as_by(model, clean, prompt, asked, tolerance=1e-2 if bound else 5e-3)
    inside = [seen for seen, _, _ in model.ranked if seen < len(prompt)]
    assert len(inside) == (2 if bound else 0)


def model_of(
    plain_model: torch.nn.Module,
    asked: dict[str, Any],
    calibration: str | None = None,
    *,
    block: int = BLOCK_SIZE,
    floor: int = FLOOR,
) -> PolicyModel:
    """A plain model of what a request asks for; ``calibration``: the file."""
    predicts = calibration is not None and policy_of(asked["kv_policy"]).calibrated
    return PolicyModel(
        plain_model,
        asked["kv_policy"],
        asked["kv_budget"],
        asked["kv_recent"],
        block,
        floor,
        protected=1 if (ends := asked.get("kv_protect") == "ends") else asked.get("kv_protect", 0),
        ends=ends,
        delay=asked.get("kv_delay", 0),
        bound=asked.get("kv_prefill_tokens", 0),
        shared=asked.get("kv_heads") == "shared",
        calibration=Calibration.load(Path(calibration)).weights
        if predicts and calibration
        else None,
    )


def assert_kept_as_by(
    model: PolicyModel,
    engine: Engine,
    prompt: list[int],
    asked: dict[str, Any],
    tolerance: float = 5e-3,
    steps: int = STEPS,
    keys_of: Callable[..., Any] | None = None,
) -> Seen:
    """The engine says what ``model`` says, and keeps what it keeps, in every layer and head."""
    ours = run_to_the_end(engine, prompt, asked, steps=steps, keys_of=keys_of)
    with one_thread():
        answer = model.generate(prompt, steps)
    assert len(model.ranked) > 1
    assert_answer(ours, *answer, tolerance)
    assert_keeps_as(model, ours.keys)
    return ours


def assert_keeps_as(
    model: PolicyModel, live: Sequence[Sequence[torch.Tensor] | torch.Tensor]
) -> None:
    """The keys of each layer and head, [S, D], are those of the tokens that ``model`` keeps.

    Rounding may swap a pair at the border of some head: two implementations give a token scores that are some
    1e-5 of their size apart, as probabilities are exponentials of large logits. So two tokens may change
    places if the model's own scores of them nearly tie, but not because they have one rank; nothing else may.
    """
    swapped = 0
    for number, heads in zip(model.layers, live, strict=True):
        layer = model.layers[number]
        for head, keys in enumerate(heads):
            where = positions(keys, layer.keys[head], tolerance=4e-3)
            kept, expected = set(where.tolist()), set(model.kept(number, head))
            assert len(kept) == len(keys) == len(expected)
            assert kept >= {*range(model.protected), *model.end}
            for one in kept ^ expected:
                margin = layer.margins[head].get(one, math.inf)
                assert margin < NEARLY_TIED, (number, head, one, margin)
            swapped += len(kept - expected)
    assert swapped <= 2


def test_law05_tokens_do_not_depend_on_the_batch(clean: Engine, text_tokens: list[int]) -> None:
    """Alone, and among others whose prompts cut theirs into other chunks."""
    chance = random.Random(6)
    asked = [
        {"kv_budget": 0.25, "kv_policy": policy, "kv_protect": protect}
        for policy, protect in [*((one, 0) for one in KEPT), *((one, 5) for one in PROTECTING)]
    ]
    jobs = [(text_tokens[900 + 40 * i : 1160 + 60 * i], one) for i, one in enumerate(asked)]
    crowd = [(text_tokens[a : a + chance.randint(20, 300)], None) for a in range(2000, 2600, 100)]
    for one, output in zip(asked, check_mix(clean, jobs, crowd, max_tokens=36), strict=True):
        report = report_of(output)
        assert report["policy"] == one["kv_policy"]
        assert report["tokens_evicted"] > 0
        assert report["tokens_held"] <= math.ceil(report["budget_tokens"] / BLOCK_SIZE + 1) * 32
