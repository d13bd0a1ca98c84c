# SPDX-License-Identifier: Apache-2.0
"""A calibration survives the disk, and is refused for any other model, in words that say why."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h2o_vllm.calibration.features import Rotation, num_features
from h2o_vllm.calibration.file import Calibration, Traits
from h2o_vllm.errors import ConfigError

TRAITS = Traits(3, 2, 8, 8, Rotation(4, True), torch.tensor([0.5, 1.5]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    count = num_features(2, 8, 8, TRAITS.rotation)
    path = tmp_path / "made" / "one.safetensors"
    Calibration(torch.rand(3, 2, count + 1), TRAITS, {"model": "one", "tokens": 7}).save(path)
    return path


def test_it_comes_back(path: Path) -> None:
    again = Calibration.load(path)
    again.save(path.with_name("copy"))
    copy = Calibration.load(path.with_name("copy"))
    for one in (again, copy):
        assert one.about == {"model": "one", "tokens": 7}
        assert one.traits.shape == TRAITS.shape
        assert torch.equal(one.weights, again.weights)
        one.check(TRAITS, path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers": 4}, "layers: 3, here: 4"),
        ({"heads": 1}, "KV heads: 2, here: 1"),
        ({"key_size": 16}, "key size: 8"),
        ({"value_size": 16}, "value size: 8"),
        ({"rotation": Rotation(8, True)}, "rotary size: 4"),
        ({"rotation": Rotation(4)}, "interleaved: True"),
        ({"norms": torch.tensor([0.5, 1.6])}, "other weights"),
        ({"norms": torch.tensor([0.5])}, "other weights"),
    ],
)
def test_another_model_is_refused(path: Path, changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        Calibration.load(path).check(replace(TRAITS, **changed), path)
    assert "made for one" in str(error.value) and "h2o_vllm.calibrate" in str(error.value)


def test_rounding_makes_no_other_model_of_it(path: Path) -> None:
    rounded = replace(TRAITS, norms=torch.tensor([0.501, 1.495]))
    Calibration.load(path).check(rounded, path)


def test_what_is_no_calibration_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Calibration.load(path.with_name("none"))
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        Calibration.load(path)
    save_file({"weights": torch.zeros(3)}, path)
    with pytest.raises(ConfigError, match="format is None"):
        Calibration.load(path)
    Calibration(torch.rand(3, 2, 5), TRAITS).save(path)
    with pytest.raises(ConfigError, match="weights of shape"):
        Calibration.load(path)
    count = num_features(2, 8, 8, TRAITS.rotation)
    Calibration(torch.full((3, 2, count + 1), torch.nan), TRAITS).save(path)
    with pytest.raises(ConfigError, match="finite"):
        Calibration.load(path)


def test_a_file_that_cannot_be_written_says_so(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        Calibration.load(path).save(path / "inside-of-a-file")
