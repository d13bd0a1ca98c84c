# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 E: layers that read the KV of another layer, and what depends on whose KV it is.

A tiny random model whose two last layers read the KV of the fourth; the second is read by itself alone. The
score of a key is the attention of all layers that read it. Laws 1 to 7 of the same model: beside the other
families, in ``test_law04_models.py`` and ``test_layers_beside.py``.
"""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from h2o_vllm.calibration.features import Rotation, features
from h2o_vllm.calibration.regression import Sums
from tests.engine import test_lanes
from tests.engine.conftest import ENGINE, FLOOR, Engine, started
from tests.engine.drafter import SPECULATIVE, Drafter
from tests.engine.fidelity import one_thread
from tests.engine.outputs import kept_of, report_of, tokens_of
from tests.engine.test_law12_drafts import watch
from tests.engine.test_policies import assert_kept_as_by, model_of
from tests.families.random_models import random_prompt, save_random_model
from tests.reference.policies import load
from tests.reference.repeating import most_attended

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OPTIONS = {**ENGINE, "skip_tokenizer_init": True}
POLICIES = [
    ("value", 0.25, 250, "equal"),
    ("value+end+key", 0.25, 530, "equal"),
    ("mean", 0.1, 530, "shared"),
    ("end", 0.1, 530, "shared"),
]
"""Policy, ``kv_recent``, tokens of the prompt, ``kv_heads``."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a model whose first heads look everywhere: heads that share slots need different numbers."""
    directory = str(tmp_path_factory.mktemp("gemma4-e"))
    save_random_model("gemma4-e", directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for layer in (1, 3):
            keys = model.model.layers[layer].self_attn.k_proj.weight
            # So small that the norm behind it leaves them small.
            keys[: len(keys) // 2] *= 1e-4
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def plain_model(directory: str) -> torch.nn.Module:
    return load(directory)


@pytest.fixture(scope="module")
def engine(directory: str, plain_model: torch.nn.Module) -> Iterator[Engine]:
    """It drafts where a test says what."""
    del plain_model
    drafting = OPTIONS | {"speculative_config": SPECULATIVE}
    with started(directory, drafting, kv_min_tokens=FLOOR, kv_trace=True) as engine:
        yield engine


@pytest.fixture(autouse=True)
def empty(engine: Engine) -> None:
    Drafter.mode, Drafter.known = "silent", []
    assert engine.llm.reset_prefix_cache()


@pytest.mark.parametrize(("policy", "recent", "length", "heads"), POLICIES)
def test_law04_each_policy_keeps_what_a_plain_model_keeps(
    engine: Engine,
    plain_model: torch.nn.Module,
    policy: str,
    recent: float,
    length: int,
    heads: str,
) -> None:
    share = 0.4 if heads == "shared" else 0.2
    asked = {
        "kv_budget": share, "kv_policy": policy, "kv_recent": recent, "kv_heads": heads,
        "kv_delay": 0,
    }  # fmt: skip
    model = model_of(plain_model, asked)
    keys_of = test_lanes.live_keys if model.shared else None
    ours = assert_kept_as_by(model, engine, random_prompt(length), asked, keys_of=keys_of)
    assert [*model.layers] == [1, 3]
    assert any(len({len(keys) for keys in heads}) > 1 for heads in ours.keys) == model.shared


def test_law12_drafts_leave_nothing_in_the_scores_of_shared_kv(engine: Engine) -> None:
    prompt = random_prompt(300)
    asked = {"kv_budget": 0.2, "kv_policy": "value+end+key", "kv_delay": 0}

    alone, expected = watch(engine, prompt, asked, 60)
    assert report_of(alone)["tokens_evicted"] > 0 and report_of(alone)["tokens_drafted"] == 0
    Drafter.known = [[*prompt, *tokens_of(alone)]]
    for mode in ("wrong", "any"):
        Drafter.mode = mode
        assert engine.llm.reset_prefix_cache()
        drafted, found = watch(engine, prompt, asked, 60)
        assert tokens_of(drafted) == tokens_of(alone)
        assert report_of(drafted)["tokens_drafted"] > 0
        counts = dict.fromkeys(("tokens_drafted", "tokens_accepted", "peak_blocks"))
        assert kept_of(drafted) | counts == kept_of(alone) | counts
        for seen in found.keys() & expected.keys():
            for mine, its in zip(found[seen], expected[seen], strict=True):
                torch.testing.assert_close(mine, its, rtol=2e-3, atol=2e-4)


def test_a_calibration_learns_from_all_layers_that_read_a_key(
    engine: Engine, directory: str
) -> None:
    text, between = random_prompt(180), random_prompt(12)
    worker = engine.worker
    worker.learn(len(text), 2 * len(text) + len(between))
    whole = [*text, *between, *text]
    engine.generate([whole], None, max_tokens=1, detokenize=False)
    assert worker.learned() == len(text) - 1
    with one_thread():
        layers = most_attended(directory, text, [*between, *text])
    for weights, (keys, values, most) in zip(worker._learner.weights(), layers, strict=True):
        sums = Sums()
        known = features(keys, values, Rotation(keys.shape[2]))
        sums.add(known[:, 1:], most[:, 1:])
        torch.testing.assert_close(weights, sums.solve(), rtol=1e-2, atol=1e-2)
