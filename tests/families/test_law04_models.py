# SPDX-License-Identifier: Apache-2.0
"""Law 4 for the families the paper evaluates, and two with another softmax: tiny models of random weights.

Llama stands for rotary positions with and without grouped queries, OPT for learned positions, biases and
a head size outside of vLLM's 32-wide kernels, GPT-NeoX for partly rotated keys. vLLM 0.32 has no GPT-NeoX of
its own any more and serves it through its Transformers backend. Gemma 2 stands for a soft cap on logits,
gpt-oss for attention sinks; in both every other layer has a sliding window, which nothing is evicted from.
Mistral stands for windows that no sequence is long enough to leave. Llama 4's attention in chunks is
left alone like windows. LFM2 stands for convolutions beside attention, Granite 4 H, Falcon-H1 and Nemotron-H
for state-space layers, Qwen3-Next for gated delta networks, partly rotated keys and gates behind attention:
there vLLM makes blocks as large as a state, and blocks of that size are evicted. In Gemma 3n and Gemma 4 E
the last layers read the KV of earlier ones, which is ranked by the attention of all that read it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from h2o_vllm.errors import ConfigError
from tests.engine.conftest import BLOCK_SIZE, ENGINE, FLOOR, Engine, started
from tests.engine.fidelity import Case, assert_as_expected, expect
from tests.families.random_models import MODELS, OPTIONS, random_prompt, save_random_model
from tests.families.spared import spared
from tests.reference.policies import PolicyModel, load

BUDGETS = {"0.1-several-chunks": (0.1, 0.5, 1100), "0.3-heavy": (0.3, 0.2, 330)}
"""Share kept, recent share of it, tokens of the prompt."""

BLOCKS = {"granite-4-h": 160, "falcon-h1": 160, "nemotron-h": 160, "qwen3-next": 160}
"""Tokens per block, where vLLM makes them larger than we ask for."""

LIKE = {
    "llama-mha": "llama-gqa4",
    "mistral": "llama-gqa4",
    "gemma3n": "gemma4-e",
    "nemotron-h": "granite-4-h",
}
"""Kinds that the full tier leaves out, and another that is served by the same code."""

UNROTATED = {"llama-4", "nemotron-h"}
"""Whose evictable layers have keys without positions; Llama 4's lie in another order in vLLM."""


class Served(NamedTuple):
    """An engine, and what it should do at each budget."""

    engine: Engine
    cases: dict[str, Case]
    rotates: bool


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.long) if kind in LIKE else kind for kind in MODELS
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind = request.param
    directory = str(tmp_path_factory.mktemp(kind))
    save_random_model(kind, directory)
    # Before the engine: vLLM's Transformers backend makes the model's class its own, for all of the
    # process, and the class then no longer works without vLLM.
    model, block = load(directory), BLOCKS.get(kind, BLOCK_SIZE)
    cases = {
        name: expect(
            PolicyModel(model, "attention", fraction, recent, block, FLOOR), random_prompt(length)
        )
        for name, (fraction, recent, length) in BUDGETS.items()
    }
    # A tokenizer would have nothing to say.
    options = {**ENGINE, "skip_tokenizer_init": True, **OPTIONS.get(kind, {})}
    with spared(kind), started(directory, options, kv_min_tokens=FLOOR) as engine:
        yield Served(engine, cases, kind not in UNROTATED)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("budget", list(BUDGETS))
def test_kept_tokens_scores_and_logits_equal_the_papers(served: Served, budget: str) -> None:
    assert_as_expected(served.engine, served.cases[budget], told_apart=served.rotates)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_model_of_windows_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_random_model("mistral", str(tmp_path), sliding_window=64)
    options = {**ENGINE, "skip_tokenizer_init": True}
    reason = "nothing to evict from this model: all its layers have sliding windows of 64 tokens"
    with pytest.raises(ConfigError, match=reason), started(str(tmp_path), options):
        pass
