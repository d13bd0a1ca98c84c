# SPDX-License-Identifier: Apache-2.0
"""The reference itself does what the paper and our design say, however tokens are fed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.fidelity import one_thread
from tests.families.random_models import VOCABULARY, save_random_model
from tests.reference.h2o import Reference

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
    forcing.read(texts[:1])
    forced = forcing.force(torch.tensor([tokens]))
    wanted = logprobs[1:].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    torch.testing.assert_close(forced[0], wanted, rtol=0, atol=1e-4)
    for layer, cache in generating.layers.items():
        assert torch.equal(cache.alive, forcing.layers[layer].alive)


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


@pytest.mark.parametrize(("recent", "start"), [(0.5, 64), (1.0, 64)])
def test_the_window_is_rounded_to_blocks(
    directory: str, texts: torch.Tensor, recent: float, start: int
) -> None:
    """Of 80 tokens 10 or 20 are recent: from 70 or 60, to the nearest block that is full before it."""
    model = Reference(directory, 0.25, recent, 32, floor=10)
    model.read(texts[:, :80])
    assert model.recent_from == start
    model.force(texts[:, 80:82])
    # 60 in excess are one block.
    assert model.held == 80 - 32 + 1
