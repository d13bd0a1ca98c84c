# SPDX-License-Identifier: Apache-2.0
"""``kv_heads`` "shared" on the real engine: laws 4, 5 and 8; blocks come home from each."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from h2o_vllm.kernels.cpu.batch import key_value_views
from tests.calibration.made import make_calibration
from tests.engine.conftest import BLOCK_SIZE, ENGINE, FLOOR, Engine, started
from tests.engine.outputs import kept_of, report_of, tokens_of
from tests.engine.test_policies import assert_kept_as_by, model_of
from tests.reference.policies import load
from tests.served import SHARING

pytestmark = pytest.mark.e2e

KEEN = (0.1, 1.0, 0.3, 2.0)
"""Factors on the keys of the model's KV heads: one looks everywhere, one at few tokens."""
STEPS = 60
"""Generated tokens: enough for an eviction after the first one."""


@pytest.fixture(scope="module")
def uneven_dir(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose heads need different numbers of tokens, which random weights alone do not give."""
    folder = tmp_path_factory.mktemp("uneven") / "model"
    shutil.copytree(model_dir, folder)
    config = LlamaConfig.from_pretrained(model_dir)
    config.num_key_value_heads = len(KEEN)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            keys = layer.self_attn.k_proj.weight.unflatten(0, (len(KEEN), -1))
            keys *= torch.tensor(KEEN)[:, None, None]
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def plain_model(uneven_dir: str) -> torch.nn.Module:
    return load(uneven_dir)


@pytest.fixture(scope="module")
def calibrated(uneven_dir: str) -> str:
    """The file."""
    return str(make_calibration(Path(uneven_dir), Path(uneven_dir) / "calibration.h2o"))


@pytest.fixture(scope="module")
def mixed(uneven_dir: str, calibrated: str) -> Iterator[Engine]:
    """An engine that leaves rows to vLLM's kernel where it can."""
    options = {"kv_min_tokens": FLOOR, "kv_trace": True, "kv_calibration": calibrated}
    with started(uneven_dir, ENGINE, beside=True, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def own(uneven_dir: str, calibrated: str) -> Iterator[Engine]:
    """One that leaves none."""
    options = {"kv_min_tokens": FLOOR, "kv_full_kernel": "h2o", "kv_heads": "shared",
               "kv_calibration": calibrated}  # fmt: skip
    with started(uneven_dir, ENGINE, beside=True, **options) as engine:
        yield engine


@pytest.fixture
def clean(mixed: Engine) -> Engine:
    assert mixed.llm.reset_prefix_cache()
    return mixed


def live_keys(engine: Engine, request_id: str, live: int) -> list[list[torch.Tensor]]:
    """Of each layer and head: the keys that attention sees, [S, D]; ``live`` tokens on average."""
    state = engine.worker._state
    table = engine.worker.model_runner.requests[request_id].block_ids[state.kv_cache_group]
    blocks = [block for block in table if block != 0]
    shared = state.lanes._requests[request_id]
    found = []
    for layer, kv_cache in enumerate(state.kv_caches):
        keys = key_value_views(kv_cache)[0].transpose(2, 3)
        heads = []
        for head in range(keys.shape[1]):
            pages = [
                keys[block, lane]
                for place, block in enumerate(shared.heavy_blocks)
                for lane, owner in enumerate(shared.owners[layer, place].tolist())
                if owner == head
            ]
            extra = (len(pages) - len(shared.heavy_blocks)) * BLOCK_SIZE
            pages += [keys[block, head] for block in blocks if block not in shared.heavy_blocks]
            heads.append(torch.cat(pages)[: live + extra].clone())
        found.append(heads)
    return found


CASES = {
    "attention": ({"kv_recent": 0.25}, 400),
    "value-protected-delayed": ({"kv_recent": 0.25, "kv_protect": 50, "kv_delay": 2}, 390),
    "end-protected": ({"kv_recent": 0.25, "kv_protect": 70}, 530),
    "mean": ({"kv_recent": 0.25}, 330),
    "value-ends": ({"kv_recent": 0.25, "kv_protect": "ends", "kv_delay": 2}, 480),
    "predicted+key": ({"kv_recent": 0.1, "kv_protect": 50}, 400),
    "predicted+value+end+key": ({"kv_recent": 0.25, "kv_delay": 2}, 530),
    "predicted-bounded": ({"kv_recent": 0.25, "kv_prefill_tokens": 384}, 545),
    "attention-bounded": ({"kv_recent": 0.25, "kv_prefill_tokens": 384, "kv_protect": 50}, 545),
}
"""The policy is what comes before a hyphen."""
FAST = ("attention", "predicted+key", "value-ends", "attention-bounded")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in CASES]
)
def test_law04_the_kept_set_equals_that_of_a_plain_model(
    clean: Engine, plain_model: torch.nn.Module, text_tokens: list[int], calibrated: str, name: str
) -> None:
    """In every layer each head keeps its own number of tokens; together as many as if all kept the same."""
    fields, length = CASES[name]
    policy = name.partition("-")[0]
    asked = {"kv_budget": 0.4, "kv_policy": policy, "kv_heads": "shared", **fields}
    assert_kept(clean, plain_model, text_tokens[300 : 300 + length], asked, calibrated)


DRAWS = [0, pytest.param(1, marks=pytest.mark.slow)]
DRAWS += [pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8)]


@pytest.mark.parametrize("heads", ["shared", "equal"])
@pytest.mark.parametrize("seed", DRAWS)
def test_law04_tokens_of_one_rank_do_not_tie(
    clean: Engine,
    plain_model: torch.nn.Module,
    text_tokens: list[int],
    calibrated: str,
    heads: str,
    seed: int,
) -> None:
    """Whatever the prompt: which of two tokens of one rank stays does not depend on where they lie.

    Predicted scores stay as they are, so that such pairs would still be there at a second eviction, whose
    candidates lie in any order.
    """
    chance = random.Random(seed)
    length = chance.choice([330, 400, 460, 530])
    at = chance.randrange(len(text_tokens) - length)
    asked = {"kv_budget": 0.4, "kv_policy": "predicted+key", "kv_heads": heads,
             "kv_recent": 0.1}  # fmt: skip
    assert_kept(clean, plain_model, text_tokens[at : at + length], asked, calibrated)


def assert_kept(
    engine: Engine,
    plain_model: torch.nn.Module,
    prompt: list[int],
    asked: dict[str, Any],
    calibration: str,
) -> None:
    """The engine says and keeps what a plain model does that shares, or does not, as ``asked``."""
    shares = asked["kv_heads"] == "shared"
    keys_of = live_keys if shares else None
    model = model_of(plain_model, asked, calibration)
    ours = assert_kept_as_by(model, engine, prompt, asked, 1e-2, STEPS, keys_of)
    assert ours.report["heads"] == asked["kv_heads"]
    # If no layer's heads kept different numbers, the test would prove nothing of sharing.
    assert any(len({len(keys) for keys in heads}) > 1 for heads in ours.keys) == shares


def every_kind(text_tokens: list[int]) -> tuple[list[list[int]], list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = [{"kv_policy": policy} for policy in SHARING]
    asked += [{"kv_protect": 70}]
    asked += [
        {"kv_policy": policy, "kv_prefill_tokens": 160}
        for policy in ("attention", "mean", "value", "predicted+key")
    ]
    asked = [{"kv_budget": 0.3, "kv_heads": "shared"} | one for one in asked]
    return [text_tokens[900 + 40 * i : 1160 + 60 * i] for i in range(len(asked))], asked


@pytest.mark.slow
def test_law05_tokens_depend_neither_on_the_batch_nor_on_whose_kernel_serves_others(
    clean: Engine, own: Engine, text_tokens: list[int]
) -> None:
    chance = random.Random(6)
    prompts, asked = every_kind(text_tokens)
    alone = [
        clean.generate([prompt], one, max_tokens=STEPS)[0]
        for prompt, one in zip(prompts, asked, strict=True)
    ]
    crowd = [text_tokens[a : a + chance.randint(20, 300)] for a in range(2000, 2600, 100)]
    for engine in (clean, own):
        assert engine.llm.reset_prefix_cache()
        budgets: list[dict[str, Any] | None] = [{"kv_budget": 0.3, "kv_heads": "equal"}, None] * 3
        outputs = engine.generate([*crowd, *prompts], [*budgets, *asked], max_tokens=STEPS)
        for one, reference, output in zip(asked, alone, outputs[len(crowd) :], strict=True):
            assert tokens_of(output) == tokens_of(reference), one
            assert kept_of(output) == kept_of(reference), one
            assert report_of(output)["tokens_evicted"] > 0
        engine.scheduler.blocks.check_integrity(idle=True)
        # Who has ended is told with the next step.
        engine.generate(crowd[:1], None, max_tokens=2)
        assert len(engine.worker._state.lanes) == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["attention", "predicted+key"])
def test_law05_a_preempted_request_goes_on_as_if_nothing_had_happened(
    clean: Engine, text_tokens: list[int], policy: str
) -> None:
    """Its KV is computed anew: nobody may look for it in the lanes that it had."""
    asked = {"kv_budget": 0.35, "kv_policy": policy, "kv_heads": "shared"}
    prompt = text_tokens[100:320]
    (alone,) = clean.generate([prompt], asked, max_tokens=130)
    lanes = clean.worker._state.lanes
    together, with_lanes = clean.crowd_out(prompt, asked, text_tokens, lambda: len(lanes))
    assert with_lanes[0] == 1
    assert tokens_of(together) == tokens_of(alone)
    assert kept_of(together) == kept_of(alone)
