# SPDX-License-Identifier: Apache-2.0
"""Rungs of a calibrated model keep what its calibration foretells most of, wherever a token comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h2o_vllm.calibration.features import Rotation, num_features
from h2o_vllm.calibration.file import Calibration, Traits
from loadtest.quality.ladder.forcing import Forcing
from loadtest.quality.ladder.keep import keep, parse_rung
from loadtest.quality.ladder.model import LadderModel
from loadtest.quality.ladder.reading import read_prompt
from loadtest.quality.ladder.settings import parse_arguments
from loadtest.quality.ladder.zap import Zap
from tests.families.random_models import VOCABULARY

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture
def model(directory: str) -> LadderModel:
    made = LadderModel(directory, torch.float32)
    made.zap = by_last_value(made)
    return made


def tokens_of(seed: int, count: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=source).tolist()


def by_last_value(model: LadderModel) -> Zap:
    """One that looks at nothing but the last number of the last head's value."""
    config = model.config
    heads, size = config.num_key_value_heads, config.head_dim
    rotation = Rotation(size)
    weights = torch.zeros(
        config.num_hidden_layers, heads, num_features(heads, size, size, rotation) + 1
    )
    # An attention, and so below 1.
    weights[..., -2], weights[..., -1] = 1.0, -20.0
    return Zap(weights, rotation)


def test_rungs_keep_what_it_foretells_most_of(model: LadderModel) -> None:
    (prompt,) = read_prompt(model, [tokens_of(4, 100)])
    kept = keep(parse_rung("zap:0"), prompt, 0.2)
    values = torch.stack([kv.values[-1, :, -1] for kv in prompt.layers])
    # Of equals the newest.
    values = values.double() + torch.arange(100) * 2.0**-17
    values[:, :4] = torch.inf
    best = values.topk(20, dim=1).indices
    for layer, places in enumerate(best):
        assert all(sorted(places.tolist()) == row.nonzero()[:, 0].tolist() for row in kept[layer])


def test_forced_texts_are_ranked_by_it_too(model: LadderModel) -> None:
    (prompt,) = read_prompt(model, [tokens_of(4, 100)])
    forcing = Forcing(prompt, [parse_rung("zap:0.25")], 0.2, 4)
    forcing.evict()
    for layer, kv in enumerate(prompt.layers):
        alive = forcing.alive[layer][0, 0, 4:96]
        values = kv.values[-1, 4:96, -1]
        kept = values[alive].sort(descending=True).values
        assert alive.sum() < 30 and kept[len(kept) // 2] > values[~alive].max()


def test_who_wants_a_calibration_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_rung("caote/zap:layer").zaps and not parse_rung("gate+repeat").zaps
    with pytest.raises(SystemExit):
        parse_arguments(["--rungs", "zap"])
    assert "--calibration" in capsys.readouterr().err


def test_a_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    rotation = Rotation(8)
    traits = Traits(3, 2, 8, 8, rotation, torch.ones(2))
    weights = torch.zeros(3, 2, num_features(2, 8, 8, rotation) + 1)
    Calibration(weights, traits).save(tmp_path / "one.safetensors")
    assert Zap.load(tmp_path / "one.safetensors", 3, 2).rotation == rotation
    with pytest.raises(SystemExit, match="3 layers of 2 KV heads, not 4 of 2"):
        Zap.load(tmp_path / "one.safetensors", 4, 2)
