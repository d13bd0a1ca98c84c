# SPDX-License-Identifier: Apache-2.0
"""The embedded model's directory is complete or absent, whatever happens while it is made."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from h2o_vllm.calibration.file import Calibration
from h2o_vllm.errors import ConfigError
from h2o_vllm.models import (
    DEFAULT_MODEL_NAME,
    default,
    default_calibration,
    default_model_dir,
)
from h2o_vllm.models.store import prepared
from tests.processes import python, until

CONVERT_SLOWLY = """
import sys, time
from pathlib import Path
from h2o_vllm.models.store import prepared

def convert(target):
    with open(sys.argv[2], "a") as log:
        log.write("x")
    (target / "first").write_text("written before the kill")
    while not Path(sys.argv[3]).exists():
        time.sleep(0.02)
    (target / "second").write_text("written after it")

print(prepared(Path(sys.argv[1]), convert))
"""


def start_conversion(
    directory: Path, log: Path, until: Path, stderr: IO[str] | int
) -> subprocess.Popen[str]:
    """Prepare ``directory`` in another process, whose conversion ends when ``until`` is there.

    ``log`` gets one letter per conversion begun.
    """
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT_SLOWLY, str(directory), str(log), str(until)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def write_one_file(target: Path) -> None:
    (target / "weights").write_text("complete")


def never(target: Path) -> None:
    raise AssertionError(f"converted again into {target}")


def test_converts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "not" / "yet" / "there"
    assert prepared(directory, write_one_file) == directory
    assert (directory / "weights").read_text() == "complete"
    assert "preparing" in capsys.readouterr().err
    assert prepared(directory, never) == directory
    assert capsys.readouterr() == ("", "")


def test_two_starts_at_once_convert_once(tmp_path: Path) -> None:
    log, go_on = tmp_path / "log", tmp_path / "go-on"
    said = [(tmp_path / f"said-{number}").open("w+") for number in range(3)]
    starts = [start_conversion(tmp_path / "model", log, go_on, stderr) for stderr in said]
    texts = [Path(stderr.name) for stderr in said]
    until(lambda: sum("waiting for it" in text.read_text() for text in texts) == 2)
    go_on.touch()
    outs = {start.communicate(timeout=300)[0].strip() for start in starts}
    assert outs == {str(tmp_path / "model")}
    assert log.read_text() == "x"


def test_killed_conversion_is_never_used(tmp_path: Path) -> None:
    directory, log = tmp_path / "model", tmp_path / "log"
    start = start_conversion(directory, log, tmp_path / "never", subprocess.DEVNULL)
    half_written = tmp_path / "model.part" / "first"
    until(half_written.exists)
    start.kill()
    start.communicate()
    assert not directory.exists()

    prepared(directory, write_one_file)
    assert [path.name for path in directory.iterdir()] == ["weights"]
    assert not half_written.parent.exists()


def test_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    def convert(target: Path) -> None:
        write_one_file(target)
        Path("/dev/full").write_bytes(b"no room for this")

    with pytest.raises(ConfigError, match=r"No space left.*XDG_CACHE_HOME") as caught:
        prepared(tmp_path / "model", convert)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


@pytest.mark.parametrize("constant", ["PACKAGE", "GGUF_FILE"])
def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, constant: str) -> None:
    monkeypatch.setattr(default, constant, "not_there")
    with pytest.raises(ConfigError, match=r"h2o-vllm\[model\]"):
        default_model_dir()


def test_command_prints_only_the_directory() -> None:
    done = python("-m", "h2o_vllm.models")
    directory = Path(done.stdout.removesuffix("\n"))
    assert directory.name.startswith(DEFAULT_MODEL_NAME)
    assert (directory / "model.safetensors").stat().st_size > 2e8


def test_command_reports_errors_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "h2o_vllm").write_text("in the way")
    done = python("-m", "h2o_vllm.models", environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert done.stdout == ""
    assert "XDG_CACHE_HOME" in done.stderr
    assert "Traceback" not in done.stderr


def test_model_answers_and_stops() -> None:
    transformers = pytest.importorskip("transformers")
    directory = default_model_dir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    # In float32: this model finds "L" nearly as likely as "The", and bfloat16's rounding can decide it.
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0]
    answer = output[prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] == tokenizer.eos_token_id


def test_its_calibration_is_one_of_it() -> None:
    """That it is of this model's weights, the worker checks whenever a server starts without a model."""
    calibration = Calibration.load(default_calibration())
    config = json.loads((default_model_dir() / "config.json").read_text())
    traits = calibration.traits
    assert traits.layers == config["num_hidden_layers"]
    assert traits.heads == config["num_key_value_heads"]
    assert calibration.about["pieces"] == 16


def test_tokenizer_splits_digits_and_loses_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir())
    # Two blanks before a digit are one token: the digit was split off before.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    text = "It's  2024:\n\n\théllo 日本 🎉 <|im_end|> and on"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    config = json.loads((default_model_dir() / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
