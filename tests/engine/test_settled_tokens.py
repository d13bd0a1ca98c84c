# SPDX-License-Identifier: Apache-2.0
"""Laws 1 and 4 to 7 of settled segments, on tokens: the real engine, float32.

A request reads the blocks that others have computed under its lineage. Its answer equals that with an empty
cache.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_vllm.calibration.file import Calibration
from tests.engine.conftest import BLOCK_SIZE, FLOOR, Engine
from tests.engine.outputs import kept_of, report_of, tokens_of
from tests.engine.test_policies import assert_kept_as_by
from tests.reference.policies import load
from tests.reference.settling import SettlingModel
from tests.served import policy_of

pytestmark = pytest.mark.e2e

WINDOW = 256
"""Segments of 64 tokens: two blocks, of which one stays."""
SETTLES = {"kv_budget": 0.5, "kv_policy": "key", "kv_settle_tokens": WINDOW}
LINEAGES: list[dict[str, Any] | None] = [
    SETTLES,
    SETTLES | {"kv_protect": 50},
    SETTLES | {"kv_policy": "predicted+key"},
    SETTLES | {"kv_policy": "random", "kv_protect": 0},
    SETTLES | {"kv_settle_tokens": 512},
    SETTLES | {"kv_settle_tokens": 512, "kv_budget": 0.25},
    {"kv_budget": 0.3, "kv_policy": "key"},
    {"kv_budget": 0.3, "kv_protect": 100},
    None,
]


@pytest.fixture(scope="module")
def plain_model(model_dir: str) -> torch.nn.Module:
    return load(model_dir)


@pytest.mark.parametrize(
    ("policy", "protect"),
    [("key", 0), pytest.param("predicted", 0, marks=pytest.mark.slow), ("predicted+key", 50)],
)
def test_law04_what_settles_is_what_a_plain_model_keeps(
    clean: Engine,
    plain_model: torch.nn.Module,
    text_tokens: list[int],
    calibration: str,
    policy: str,
    protect: int,
) -> None:
    prompt = text_tokens[300:865]
    asked = SETTLES | {"kv_policy": policy, "kv_protect": protect}
    model = SettlingModel(plain_model, policy, 0.5, 0.0, BLOCK_SIZE, FLOOR, protect, window=WINDOW)
    if policy_of(policy).calibrated:
        model.calibration = Calibration.load(Path(calibration)).weights
    assert_kept_as_by(model, clean, prompt, asked)
    assert model.ranked[-1][0] > len(prompt), "one settles in the answer"


def assert_as_alone(
    engine: Engine, asked: list[tuple[list[int], Any]], outputs: list[Any], **params: Any
) -> None:
    for (prompt, one), output in zip(asked, outputs, strict=True):
        assert engine.llm.reset_prefix_cache()
        (alone,) = engine.generate([prompt], one, **params)
        assert tokens_of(output) == tokens_of(alone), one
        expected = {**kept_of(alone), "peak_blocks": None}
        assert {**kept_of(output), "peak_blocks": None} == expected, one


@pytest.mark.slow
def test_law05_lineages_do_not_see_each_other(clean: Engine, text_tokens: list[int]) -> None:
    """Requests with a common prefix, three of each lineage, run at once in a small pool, in random order."""
    chance = random.Random(4)
    prompts = [text_tokens[200:700] + text_tokens[a : a + 100] for a in (1000, 2000, 1000)]
    asked = [(prompt, one) for prompt in prompts for one in LINEAGES]
    chance.shuffle(asked)
    outputs = clean.generate([p for p, _ in asked], [one for _, one in asked], max_tokens=60)
    clean.scheduler.blocks.check_integrity(idle=True)
    settled = [report_of(output) for output in outputs if report_of(output)["tokens_settled"]]
    assert len(settled) == 18
    assert sum(one["tokens_cached"] > 0 for one in settled) > 6
    assert_as_alone(clean, asked, outputs, max_tokens=60)


def test_law06_what_memory_held_before_means_nothing(clean: Engine, text_tokens: list[int]) -> None:
    """The blocks into which segments settle hold old KV, and scores above all candidates'."""
    prompt = text_tokens[400:1000]
    (alone,) = clean.generate([prompt], SETTLES, max_tokens=30)
    assert clean.llm.reset_prefix_cache()
    state = clean.worker._state
    state.scores.fill_(torch.inf)
    for kv in state.kv_caches:
        # Not NaN: in the newest block vLLM's kernel also reads slots that are not written yet.
        kv.fill_(1e4)
    (again,) = clean.generate([prompt], SETTLES, max_tokens=30)
    assert tokens_of(again) == tokens_of(alone) and kept_of(again) == kept_of(alone)


def test_law01_until_something_settles_it_is_stock(clean: Engine, text_tokens: list[int]) -> None:
    """It reads blocks that stock requests have computed, and they read its blocks."""
    prompt = text_tokens[100:400]
    (full,) = clean.generate([prompt], max_tokens=19)
    (short,) = clean.generate([prompt], SETTLES, max_tokens=19)
    assert tokens_of(short) == tokens_of(full)
    assert report_of(short)["tokens_cached"] == 288 and not report_of(short)["tokens_settled"]
    assert clean.llm.reset_prefix_cache()
    (longer,) = clean.generate([text_tokens[100:600]], SETTLES, max_tokens=4)
    assert report_of(longer)["tokens_settled"]
    (after,) = clean.generate([text_tokens[100:600]], max_tokens=4)
    assert report_of(after)["tokens_cached"] == WINDOW + 64


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_law05_a_preempted_request_goes_on_as_if_nothing_had_happened(
    clean: Engine, text_tokens: list[int], lost: bool
) -> None:
    """It finds its own blocks in the cache, or computes all of them again."""

    prompt = text_tokens[100:500]
    (alone,) = clean.generate([prompt], SETTLES, max_tokens=100)
    assert clean.llm.reset_prefix_cache()
    llm_engine, scheduler = clean.llm.llm_engine, clean.scheduler
    clean.begin("one", prompt, SETTLES, max_tokens=100)
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            if output.finished:
                together = output
        (request,) = scheduler.requests.values() if scheduler.requests else (None,)
        if request is None or request.num_preemptions:
            continue
        preempted = request
        if request.num_computed_tokens == 460:
            if lost:
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
            else:
                scheduler.running.remove(request)
                scheduler._preempt_request(request, 0.0)
            settled = scheduler.blocks.settled
            found = settled.lookup(settled.states[request.request_id], request.num_tokens - 1)
            assert found[1] == (0 if lost else 448)
    assert preempted.num_preemptions == 1
    assert tokens_of(together) == tokens_of(alone)
    assert kept_of(together) == kept_of(alone)
