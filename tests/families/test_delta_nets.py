# SPDX-License-Identifier: Apache-2.0
"""Gated delta networks as they are served: in bfloat16, by vLLM's kernels.

In float32 the laws hold to the token (``test_law04_models.py``, ``test_layers_beside.py``). In bfloat16
rounding decides between near ties, and one token may change all that follow. Here the reference follows the
engine's tokens, and agrees with it up to that rounding.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.engine.conftest import ENGINE, FLOOR, NUM_BLOCKS, Engine, started
from tests.engine.fidelity import one_thread, run_to_the_end
from tests.families.random_models import random_prompt, save_random_model
from tests.reference.policies import PolicyModel, load

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK = 288
"""Tokens: a state of float32 is as large."""
PROMPT = random_prompt(700)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("qwen3-next"))
    save_random_model("qwen3-next", directory)
    return directory


@pytest.fixture(scope="module")
def engine(directory: str) -> Iterator[Engine]:
    # vLLM takes states of float32 on some CPUs, whatever the model's type.
    served = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "skip_tokenizer_init": True}
    with started(directory, {**ENGINE, **served}, kv_min_tokens=FLOOR) as engine:
        yield engine


def test_vllms_kernels_agree_with_the_reference_up_to_bfloat16(
    engine: Engine, directory: str
) -> None:
    ours = run_to_the_end(engine, PROMPT, {"kv_budget": 0.5})
    model = load(directory).bfloat16().float()
    reference = PolicyModel(model, "attention", 0.5, 0.5, BLOCK, FLOOR)
    with one_thread():
        _, expected = reference.generate(PROMPT, len(ours.tokens), ours.tokens)
    for step, entries in enumerate(ours.logprobs[1:], 1):
        token = ours.tokens[step]
        assert entries[token].logprob == pytest.approx(float(expected[step, token]), abs=0.3)
    assert ours.report["block_size"] == BLOCK
    assert ours.report["tokens_held"] == reference.held
    assert reference.held < reference.seen
    for layer, keys in zip(reference.layers, ours.keys, strict=True):
        for head in range(keys.shape[0]):
            distance = torch.cdist(keys[head].float(), reference.layers[layer].keys[head])
            kept = set(distance.argmin(1).tolist())
            shared = len(kept & set(reference.kept(layer, head))) / reference.held
            # Each CPU rounds in its own way; by chance 0.5 are the same.
            assert shared > 0.9, (
                f"layer {layer}, head {head}: {shared:.0%} of the kept tokens are the same"
            )
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
