# SPDX-License-Identifier: Apache-2.0
"""Laws 5 and 6 across LoRA adapters of random weights; vLLM serves them on CPU with its torch operators."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loadtest.common.tiny_model import VOCABULARY, make_tiny_model
from tests.engine.adapters import make_adapters, say
from tests.engine.conftest import BLOCK_SIZE, ENGINE, FLOOR, Engine, started
from tests.engine.outputs import kept_of, report_of, tokens_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

H2O = {"kv_budget": 0.3}
PINNED = {"kv_budget": 0.3, "kv_protect": 4 * BLOCK_SIZE}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, list[Any]]]:
    """An engine, and whom a prompt may be for: the model itself and two adapters."""
    place = tmp_path_factory.mktemp("lora")
    model = make_tiny_model(place / "model")
    # One slot stays empty: vLLM 0.32 on CPU takes the last one's adapter for "none".
    options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "skip_tokenizer_init": True}
    with started(str(model), {**ENGINE, **options}, beside=True, kv_min_tokens=FLOOR) as engine:
        yield engine, [None, *make_adapters(place, model)]


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [
        torch.randint(0, VOCABULARY, (length + 17 * i,), generator=generator).tolist()
        for i in range(count)
    ]


def test_law05_tokens_do_not_depend_on_other_adapters_in_the_batch(
    adapters: tuple[Engine, list[Any]],
) -> None:
    engine, everybody = adapters
    chance, budgets = random.Random(5), (None, H2O, PINNED)
    (prompt,) = prompts(1, 400)
    asked = [(prompt, adapter, budget) for adapter in everybody for budget in budgets]
    alone = []
    for one in asked:
        assert engine.llm.reset_prefix_cache()
        alone += say(engine, [one])
    # Else nobody could be told from another.
    assert len({tuple(tokens_of(output)) for output in alone}) > len(everybody)
    assert len({tuple(tokens_of(output)) for output in alone[:: len(budgets)]}) == len(everybody)
    crowd = [(other, chance.choice(everybody), chance.choice(budgets)) for other in prompts(9, 90)]
    mixed = [*crowd, *asked]
    order = chance.sample(range(len(mixed)), len(mixed))
    assert engine.llm.reset_prefix_cache()
    outputs = dict(zip(order, say(engine, [mixed[i] for i in order]), strict=True))
    for i, reference in enumerate(alone, start=len(crowd)):
        assert tokens_of(outputs[i]) == tokens_of(reference), mixed[i][1:]
        assert kept_of(outputs[i]) == kept_of(reference), mixed[i][1:]
    assert sum(report_of(output)["blocks_freed"] for output in outputs.values()) > 50
    engine.scheduler.blocks.check_integrity(idle=True)


def test_law06_adapters_share_no_block_and_corrupt_nobody(
    adapters: tuple[Engine, list[Any]],
) -> None:
    """Full and budgeted requests of all adapters on one prompt, one after the other and together."""
    engine, everybody = adapters
    (prompt,) = prompts(1, 500)
    assert engine.llm.reset_prefix_cache()
    before = []
    for adapter in everybody:
        before += say(engine, [(prompt, adapter, None)])
        # The others' blocks of the same tokens are not this one's.
        assert before[-1].num_cached_tokens == 0
    assert len({tuple(tokens_of(output)) for output in before}) == len(everybody)
    mixed = [(prompt, adapter, budget) for budget in (H2O, None, H2O) for adapter in everybody]
    outputs = say(engine, mixed)
    after = say(engine, [(prompt, adapter, None) for adapter in everybody])
    for i, reference in enumerate(before):
        assert tokens_of(outputs[len(everybody) + i]) == tokens_of(reference)
        assert tokens_of(outputs[i]) == tokens_of(outputs[2 * len(everybody) + i])
        assert tokens_of(after[i]) == tokens_of(reference)
        assert after[i].num_cached_tokens == 500 // BLOCK_SIZE * BLOCK_SIZE
    assert all(report_of(output)["blocks_freed"] for output in outputs[: len(everybody)])
