# SPDX-License-Identifier: Apache-2.0
"""The command that calibrates: what it learns of a real model predicts repetitions, and serves them."""

import copy
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from h2o_vllm.calibrate import __main__ as command
from h2o_vllm.calibrate.run import LENGTH
from h2o_vllm.calibrate.texts import SOURCES, instruction, pieces
from h2o_vllm.calibration.features import Rotation, features
from h2o_vllm.calibration.file import Calibration
from h2o_vllm.calibration.regression import Sums
from h2o_vllm.errors import ConfigError
from tests.calibration.made import predicted
from tests.engine.conftest import ENGINE, started
from tests.reference.repeating import most_attended, repetition

MISSING = "no-such-model"


@pytest.mark.e2e
@pytest.mark.long
def test_a_real_model_is_learned_and_predicted(embedded_dir: str, tmp_path: Path) -> None:
    """Judged by a transformers model, on a text that nobody has learned from."""
    file = tmp_path / "model.h2o"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
        arguments = ["--model", embedded_dir, "--output", str(file), "--pieces", "1"]
        assert command.main([*arguments, "--dtype", "float32"]) == 0
    made = Calibration.load(file)
    assert made.about["pieces"] == len(SOURCES)
    assert made.about["tokens"] == (LENGTH - 1) * len(SOURCES)
    tokenizer = AutoTokenizer.from_pretrained(embedded_dir)
    source = Path(str(torch.nn.modules.rnn.__file__)).read_text()
    text = tokenizer.encode(source, add_special_tokens=False, verbose=False)[:600]
    found = []
    layers = most_attended(embedded_dir, text, repetition(tokenizer, text))
    for weights, (keys, values, most) in zip(made.weights, layers, strict=True):
        scores = predicted(weights, features(keys, values, made.traits.rotation))
        best = [set(one.flatten().topk(450).indices.tolist()) for one in (scores, most)]
        found.append(len(best[0] & best[1]) / 450)
    # By chance a quarter.
    assert sum(found) / len(found) > 0.5


def weights_of(model: str, source: str) -> torch.Tensor:
    """What an independent model learns from two pieces of a text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    learned: dict[int, Sums] = defaultdict(Sums)
    for text in pieces([source], encode, LENGTH, 2):
        again = repetition(tokenizer, text)
        assert again == [*instruction(tokenizer), *text]
        for layer, (keys, values, most) in enumerate(most_attended(model, text, again)):
            known = features(keys, values, Rotation(keys.shape[2]))
            learned[layer].add(known[:, 1:], most[:, 1:])
    return torch.stack([sums.solve() for _, sums in sorted(learned.items())])


@pytest.mark.slow
@pytest.mark.e2e
def test_the_weights_are_those_of_an_independent_model(model_dir: str, tmp_path: Path) -> None:
    """Transformers reads the same texts, repeats them from its own KV, and the same regression solves."""
    file, source = tmp_path / "model.h2o", Path(str(torch.nn.modules.rnn.__file__))
    expected = weights_of(model_dir, source.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
        arguments = ["--model", model_dir, "--output", str(file), "--texts", str(source)]
        assert command.main([*arguments, "--dtype", "float32"]) == 0
    found = Calibration.load(file)
    assert found.about["tokens"] == 2 * (LENGTH - 1)
    assert found.about["texts"] == str(source)
    torch.testing.assert_close(found.weights, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.e2e
def test_the_worker_refuses_another_models_calibration(
    model_dir: str, calibration: str, tmp_path: Path
) -> None:
    tensors = load_file(calibration)
    made = Calibration.load(Path(calibration))
    other = tmp_path / "other.h2o"
    traits = copy.copy(made.traits)
    object.__setattr__(traits, "norms", tensors["norms"] * 1.5)
    Calibration(made.weights, traits, made.about).save(other)
    with (
        pytest.raises(ConfigError, match="other weights than this model"),
        started(model_dir, ENGINE, beside=True, kv_calibration=str(other)),
    ):
        pass


def test_pieces_are_whole_and_few_of_each_text() -> None:
    found = list(pieces(["a" * 10, "b" * 3, "c" * 4], lambda text: [ord(c) for c in text], 4, 2))
    assert found == [[97] * 4, [97] * 4, [99] * 4]


def test_what_python_carries_is_enough() -> None:
    texts = [source() for source in SOURCES]
    assert all(len(text) > 8_000 for text in texts)
    assert len(set(texts)) == len(SOURCES) == 8
    assert texts[-1] == SOURCES[-1](), "the same every time"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output", "{}/a/b.h2o"], "--output {}/a/b.h2o: there is no directory {}/a"),
        (["--output", "{}/b.h2o", "--texts", "{}/none"], "--texts {}/none: "),
        (["--output", "{}/b.h2o", "--pieces", "0"], "--pieces 0: wanted an integer of at least 1"),
        (["--output", "{}/b.h2o", "--tensor-parallel-size", "2"], "--tensor-parallel-size 2: one"),
        (
            ["--output", "{}/b.h2o", "--pipeline-parallel-size", "2"],
            "--pipeline-parallel-size 2: one",
        ),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    arguments = [one.format(tmp_path) for one in arguments]
    assert command.main(["--model", MISSING, *arguments]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("python -m h2o_vllm.calibrate: error: ") and "\n" not in line
    assert said.format(tmp_path, tmp_path) in line
