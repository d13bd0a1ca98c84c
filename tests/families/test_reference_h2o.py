# SPDX-License-Identifier: Apache-2.0
"""The reference itself does what the paper says."""

from pathlib import Path

import torch

from tests.engine.fidelity import one_thread
from tests.families.random_models import VOCABULARY, save_random_model
from tests.reference.policies import PolicyModel, load


def test_the_first_eviction_takes_the_lowest_scores_before_the_window(tmp_path: Path) -> None:
    """Of a random Llama whose query heads share KV heads."""
    save_random_model("llama-gqa4", directory := str(tmp_path))
    text = torch.randint(3, VOCABULARY, (80,), generator=torch.Generator().manual_seed(0))
    model = PolicyModel(load(directory), "attention", 0.25, 0.5, block=1, floor=10)
    with one_thread():
        model.generate(text.tolist(), 2)
    for layer in model.layers.values():
        scores, alive, old = layer.seen[0].sum(1), layer.alive[:, :80], torch.arange(80) < 70
        assert bool((alive.sum(-1) == 20).all()) and bool(alive[:, 70:].all())
        highest_gone = scores.masked_fill(alive, -1).amax(-1)
        lowest_spared = scores.masked_fill(~(alive & old), 1e9).amin(-1)
        assert bool((highest_gone <= lowest_spared).all())
