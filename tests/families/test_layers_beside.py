# SPDX-License-Identifier: Apache-2.0
"""Laws 1, 2, 5, 6 and 7 where layers with a window or a state lie beside evictable ones.

Tiny random models: Gemma 2's windows, LFM2's convolutions, Granite 4 H's Mamba2 layers, Qwen3-Next's gated
delta networks; and Gemma 3n and Gemma 4 E, where other layers read the KV of these (``test_shared_kv.py``
has the rest). vLLM gives each kind KV cache groups of its own, on the blocks of one pool. They forget by
themselves; only full attention is evicted. Law 4 of the same models: ``test_law04_models.py``.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from h2o_vllm.blocks.manager.spec import H2OAttentionSpec, H2OMambaSpec, H2OSlidingWindowSpec
from tests.engine.conftest import ENGINE, FLOOR, Engine, started
from tests.engine.fidelity import one_thread
from tests.engine.outputs import check_mix, report_of, tokens_of
from tests.families.random_models import OPTIONS, random_prompt, save_random_model
from tests.families.spared import spared

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KINDS = {"gemma2": H2OSlidingWindowSpec, "lfm2": H2OMambaSpec}
KINDS |= {"gemma3n": H2OSlidingWindowSpec, "gemma4-e": H2OSlidingWindowSpec}
KINDS |= {"granite-4-h": H2OMambaSpec, "qwen3-next": H2OMambaSpec}
"""What lies beside the two evictable layers of each."""
LENGTHS = (300, 650)
STEPS = 40
BUDGETS: list[dict[str, Any] | None] = [
    None,
    {"kv_budget": 0.2},
    {"kv_budget": 0.4, "kv_recent": 0.2},
    {"kv_budget": 0.3, "kv_policy": "window"},
    {"kv_budget": 0.3, "kv_policy": "key"},
    {"kv_budget": 0.3, "kv_policy": "value+end+key"},
    {"kv_budget": 0.2, "kv_protect": 64},
    {"kv_budget": 0.2, "kv_elastic": True},
]


@pytest.fixture(
    scope="module",
    params=[
        ("gemma2", "vllm"),
        pytest.param(("gemma2", "h2o"), marks=pytest.mark.long),
        ("gemma4-e", "vllm"),
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (("gemma3n", "vllm"), ("gemma4-e", "h2o"), ("lfm2", "vllm"))
        ),
        ("granite-4-h", "vllm"),
        ("qwen3-next", "vllm"),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A model, and the kernel for rows without a budget."""
    return request.param


@pytest.fixture(scope="module")
def directory(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp(case[0]))
    save_random_model(case[0], directory)
    return directory


@pytest.fixture(scope="module")
def lossless(directory: str) -> list[list[int]]:
    """What transformers says, with its own attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = []
    with one_thread(), torch.inference_mode():
        for length in LENGTHS:
            tokens = model.generate(
                torch.tensor([random_prompt(length)]), do_sample=False,
                min_new_tokens=STEPS, max_new_tokens=STEPS,
            )  # fmt: skip
            answers.append(tokens[0, length:].tolist())
    return answers


@pytest.fixture(scope="module")
def engine(case: tuple[str, str], directory: str) -> Iterator[Engine]:
    options = {**ENGINE, "skip_tokenizer_init": True, **OPTIONS.get(case[0], {})}
    h2o: dict[str, Any] = {"kv_min_tokens": FLOOR, "kv_full_kernel": case[1]}
    with spared(case[0]), started(directory, options, **h2o) as engine:
        yield engine


def test_each_kind_of_layer_has_its_own_blocks(engine: Engine, case: tuple[str, str]) -> None:
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    kinds = {type(group.kv_cache_spec): group.layer_names for group in groups}
    assert set(kinds) == {KINDS[case[0]], H2OAttentionSpec}
    assert len(kinds[H2OAttentionSpec]) == len(engine.worker._state.kv_caches) == 2
    # No layer but the evictable ones knows of scores.
    layers = engine.worker.compilation_config.static_forward_context
    attention = {name: layer for name, layer in layers.items() if hasattr(layer, "impl")}
    bound = {name for name, layer in attention.items() if layer.impl._state is not None}
    readers = {name for name in bound if attention[name].kv_sharing_target_layer_name}
    assert bound - readers == set(kinds[H2OAttentionSpec])
    assert len(readers) == (2 if case[0] in ("gemma3n", "gemma4-e") else 0)


def test_law01_a_full_budget_loses_nothing(engine: Engine, lossless: list[list[int]]) -> None:
    prompts = [random_prompt(length) for length in LENGTHS]
    for asked in (None, {"kv_budget": 1.0}):
        outputs = engine.generate(prompts, asked, max_tokens=STEPS, detokenize=False)
        assert [tokens_of(output) for output in outputs] == lossless


def test_law05_and_law02_any_mix_gives_what_each_gives_alone_and_every_block_comes_home(
    engine: Engine,
) -> None:
    prompt = random_prompt(400)
    assert engine.llm.reset_prefix_cache()
    # An elastic one depends on where it is squeezed; alone it never is.
    asked = [one for one in BUDGETS if not (one and "kv_elastic" in one)]
    chance = random.Random(3)
    crowd = [(random_prompt(chance.randint(40, 500)), chance.choice(BUDGETS)) for _ in range(12)]
    jobs = [(prompt, one) for one in asked]
    outputs = check_mix(engine, jobs, crowd, max_tokens=STEPS, detokenize=False)
    assert report_of(outputs[1])["tokens_evicted"] > 0


def test_law06_evictions_leave_shared_prefixes_as_they_are(engine: Engine) -> None:
    prompt = random_prompt(300)
    assert engine.llm.reset_prefix_cache()

    def whole() -> Any:
        (output,) = engine.generate([prompt], None, max_tokens=STEPS, detokenize=False)
        return output

    before = whole()
    for asked in BUDGETS[1:]:
        engine.generate([prompt], asked, max_tokens=STEPS, detokenize=False)
        after = whole()
        assert tokens_of(after) == tokens_of(before)
        # A state is kept where a chunk ended, if at all: what evicted requests leave may not be found.
        cached = report_of(after)["tokens_cached"]
        assert cached > 0 or not engine.scheduler.kv_cache_manager.enable_caching


def test_law07_others_do_not_read_what_others_computed_after_an_eviction(engine: Engine) -> None:
    """A prompt gives back blocks while it is computed; the same text without a budget comes behind it."""
    text = random_prompt(1100)

    def logprobs(more: int) -> list[float]:
        prompt = [*text, *random_prompt(more)]
        (output,) = engine.generate([prompt], None, max_tokens=1, logprobs=5, detokenize=False)
        return sorted(one.logprob for one in output.outputs[0].logprobs[0].values())

    cold = {}
    for more in (60, 70):
        assert engine.llm.reset_prefix_cache()
        cold[more] = logprobs(more)
    assert engine.llm.reset_prefix_cache()
    asked = {"kv_budget": 0.2, "kv_prefill_tokens": 128}
    engine.generate([text], asked, max_tokens=8, detokenize=False)
    for more, expected in cold.items():
        assert logprobs(more) == pytest.approx(expected, abs=1e-4), "rounding is 1e-6"
