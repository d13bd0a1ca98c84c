# SPDX-License-Identifier: Apache-2.0
"""The reference itself: both cadences do what the paper and our design say, however tokens are fed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.families.random_models import VOCABULARY, one_thread, save_random_model
from tests.reference.h2o import Foresight, Reference

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose query heads share KV heads."""
    where: Path = tmp_path_factory.mktemp("llama")
    save_random_model("llama-gqa4", str(where))
    return str(where)


@pytest.fixture(scope="module")
def texts() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 100), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("block", [1, 8])
def test_forcing_what_was_generated_evicts_and_predicts_the_same(
    directory: str, texts: torch.Tensor, block: int
) -> None:
    generating = Reference(directory, 0.3, 0.5, block, floor=10)
    tokens, logprobs = generating.generate(texts[0].tolist(), 30)
    forcing = Reference(directory, 0.3, 0.5, block, floor=10)
    forcing.read(texts[:1], chunk=33)
    forced = forcing.force(torch.tensor([tokens]))
    wanted = logprobs[1:].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    torch.testing.assert_close(forced[0], wanted, rtol=0, atol=1e-4)
    for layer, cache in generating.layers.items():
        assert torch.equal(cache.alive, forcing.layers[layer].alive)


def test_sequences_computed_together_do_not_see_each_other(
    directory: str, texts: torch.Tensor
) -> None:
    model = Reference(directory, 0.3, 0.5, 4, floor=10)
    model.read(texts[:, :70])
    together = model.force(texts[:, 70:])
    for text in range(2):
        model.read(texts[text : text + 1, :70])
        alone = model.force(texts[text : text + 1, 70:])
        torch.testing.assert_close(together[text : text + 1], alone, rtol=0, atol=1e-4)


def test_the_first_eviction_takes_the_lowest_scores_before_the_window(
    directory: str, texts: torch.Tensor
) -> None:
    model = Reference(directory, 0.25, 0.5, 1, floor=10)
    model.read(texts[:, :80])
    scores = {layer: cache.scores.clone() for layer, cache in model.layers.items()}
    model.force(texts[:, 80:82])
    for layer, cache in model.layers.items():
        alive, old = cache.alive[..., :80], torch.arange(80) < 70
        assert bool((alive.sum(-1) == 20).all()) and bool(alive[..., 70:].all())
        highest_gone = scores[layer].masked_fill(alive, -1).amax(-1)
        lowest_spared = scores[layer].masked_fill(~(alive & old), 1e9).amin(-1)
        assert bool((highest_gone <= lowest_spared).all())


def test_by_the_token_the_budget_is_held_exactly(directory: str, texts: torch.Tensor) -> None:
    model = Reference(directory, 0.25, 0.5, 1, floor=10)
    model.read(texts[:, :80])
    for seen in range(80, 98):
        model.force(texts[:, seen : seen + 2])
        # And the token that was computed after the eviction.
        assert model.held == math.ceil(0.25 * seen) + 1


@pytest.mark.parametrize(
    ("recent", "unit", "start"), [(0.5, None, 64), (0.5, 1, 70), (1.0, None, 64), (0.5, 9, 72)]
)
def test_the_window_may_be_rounded_to_blocks_or_exact(
    directory: str, texts: torch.Tensor, recent: float, unit: int | None, start: int
) -> None:
    """Of 80 tokens 10 or 20 are recent: from 70 or 60, to the nearest block that is full before it."""
    model = Reference(directory, 0.25, recent, 32, floor=10, window_unit=unit)
    model.read(texts[:, :80])
    assert model.recent_from == start
    model.force(texts[:, 80:82])
    # 60 in excess are one block.
    assert model.held == 80 - 32 + 1


def test_foresight_evicts_what_full_kv_will_attend_to_least(
    directory: str, texts: torch.Tensor
) -> None:
    prompt, forced = texts[:1, :64], texts[:1, 64:]
    model = Foresight(directory, 1.0, 0.0, 8, floor=8)
    model.read(prompt)
    before = model.snapshot()
    full = model.foresee(forced)
    # By another way: what all 99 queries give to a key, less what the first 64 gave.
    future = {n: c.scores[..., :64] - before[n].scores for n, c in model.layers.items()}

    model.layers = before
    model.layers = model.snapshot()
    torch.testing.assert_close(model.force(forced), full, rtol=0, atol=1e-4)

    model.fraction = 0.25
    model.layers = before
    model.layers = model.snapshot()
    model._evict()
    assert model.held == 16
    for layer, cache in model.layers.items():
        for alive, score in zip(cache.alive[0], future[layer][0], strict=True):
            assert score[~alive].max() <= score[alive].min() + 1e-4

    model.foresees = False
    model.layers = before
    model.layers = model.snapshot()
    plain = Reference(directory, 0.25, 0.0, 8, floor=8)
    plain.read(prompt)
    torch.testing.assert_close(model.force(forced), plain.force(forced), rtol=0, atol=1e-5)
