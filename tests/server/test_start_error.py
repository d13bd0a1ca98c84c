# SPDX-License-Identifier: Apache-2.0
"""What a failed start says: one line, whichever process it was that failed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from h2o_vllm.engine import start_record
from h2o_vllm.engine.start_record import Reason
from h2o_vllm.errors import ConfigError
from h2o_vllm.server import start_error

ARGS = argparse.Namespace(model="some/model", max_model_len=None, gpu_memory_utilization=0.92)
ENGINE_FAILED = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for failed starts, known to this process and to nobody after the test."""
    file = tmp_path / "start.log"
    monkeypatch.setenv(start_record.VARIABLE, str(file))
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    yielded = [logging.getLogger(name) for name in start_record.FAILED]
    for logger in yielded:
        monkeypatch.setattr(logger, "filters", [])
    start_record.install()
    start_record.install()
    assert [len(logger.filters) for logger in yielded] == [1, 1]
    return file


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001
        return caught


def said(error: Exception) -> str:
    """The line of an error that was raised in the server's own process."""
    return start_error.explain(start_error.reason_of(raised(error), None), ARGS)


def test_engine_leaves_reason_and_traceback_in_the_file_and_not_in_the_log(
    record: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, message = next(iter(start_record.FAILED.items()))
    logger = logging.getLogger(name)
    with caplog.at_level(logging.DEBUG, logger=name):
        try:
            raise ValueError("too little\nmemory")
        except ValueError:
            logger.exception(message)
            print("what Python says at the end", file=sys.stderr)
    assert caplog.records == []
    reason = start_record.read(record)
    assert reason is not None
    assert (reason.error, reason.message) == ("ValueError", "too little\nmemory")
    assert 'raise ValueError("too little\\nmemory")' in "".join(reason.last_lines)
    text = record.read_text()
    assert "Traceback (most recent call last)" in text
    assert text.endswith("what Python says at the end\n")
    assert record.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("what", ["another-message", "no-exception", "not-asked", "no-file"])
def test_log_keeps_what_is_no_failed_start_or_cannot_be_recorded(
    what: str, record: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, message = next(iter(start_record.FAILED.items()))
    if what == "not-asked":
        monkeypatch.delenv(start_record.VARIABLE)
    if what == "no-file":
        record.mkdir()
    logger, error = logging.getLogger(name), raised(ValueError("x"))
    with caplog.at_level(logging.DEBUG, logger=name):
        if what == "no-exception":
            logger.error(message)
        else:
            logger.error("fatal" if what == "another-message" else message, exc_info=error)
    assert len(caplog.records) == 1
    assert start_record.read(record) is None


def test_first_reason_is_the_one_and_a_link_is_not_followed(record: Path, tmp_path: Path) -> None:
    start_record.write(record, raised(ValueError("worker")), "Worker")
    start_record.write(record, raised(RuntimeError("engine")), "EngineCore")
    reason = start_record.read(record)
    assert reason is not None and reason.message == "worker"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "somebody's")
    with pytest.raises(OSError, match="symbolic"):
        start_record.write(link, raised(ValueError("x")), "Worker")


def test_every_server_begins_a_file_of_its_own_and_makes_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(start_record.VARIABLE, "inherited")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = set()
    for _ in range(3):
        start_record.begin()
        names.add(os.environ[start_record.VARIABLE])
    assert len(names) == 3 and "inherited" not in names
    assert list(tmp_path.iterdir()) == []


def test_what_the_engine_recorded_is_what_is_said(record: Path) -> None:
    start_record.write(record, raised(ConfigError("h2o_vllm cannot work with MLA")), "EngineCore")
    (line,) = start_error.describe(raised(ENGINE_FAILED), ARGS)
    assert line == f"h2o_vllm cannot work with MLA (traceback: {record})"
    # Nothing of what led to it is lost.
    assert "Engine core initialization failed" in record.read_text()


def test_surprise_shows_its_last_places(record: Path) -> None:
    start_record.write(record, raised(KeyError("lm_head.weight")), "EngineCore")
    *places, line = start_error.describe(raised(ENGINE_FAILED), ARGS)
    assert line.startswith("KeyError: 'lm_head.weight' (traceback: ")
    assert any(Path(__file__).name in place for place in places)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("start (0) + length (768) exceeds dimension size (512)."),
        RuntimeError("Cannot find any model weights with `some/model`"),
        PermissionError(13, "Permission denied"),
        KeyError("model.layers.9"),
    ],
)
def test_weights_that_cannot_be_loaded_are_said_to_be_that_whatever_the_cause(
    error: Exception, record: Path
) -> None:
    def load_weights() -> None:
        raise error

    with pytest.raises(type(error)) as found:
        load_weights()
    start_record.write(record, found.value, "EngineCore")
    (line,) = start_error.describe(raised(ENGINE_FAILED), ARGS)
    assert line.startswith("--model some/model: its weights cannot be loaded")
    assert f"{type(error).__name__}: {error}".replace("`some/model`", "")[:20] in line


def test_without_a_file_the_traceback_comes_first(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.mkdir()
    lines = start_error.describe(raised(ValueError("bad")), ARGS)
    assert lines[0].startswith("Traceback") and lines[-1] == "bad"
    monkeypatch.delenv(start_record.VARIABLE)
    assert start_error.describe(raised(ValueError("bad")), ARGS) == lines


class Limits(BaseModel):
    max_num_seqs: int = Field(1, ge=1)
    max_model_len: int = 1

    @model_validator(mode="after")
    def _longest(self) -> Limits:
        if self.max_model_len > 100:
            raise ValueError("max_model_len (101) is greater than 100.\n\nMore words.")
        return self


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs: Input should be greater than or equal to 1, got 0"),
        ({"max_model_len": 101}, "max_model_len (101) is greater than 100."),
    ],
)
def test_validation_names_the_option_and_not_the_whole_configuration(
    values: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValidationError) as found:
        Limits(**values)
    assert said(found.value) == line


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("x is not a local folder.\nMore."), ["x is not a local folder. More."]),
        (RuntimeError("Failed core proc(s): {'EngineCore': -9}"), ["signal 9", "memory"]),
        (RuntimeError("Failed core proc(s): {'EngineCore': 3}"), ["exit code 3", "above"]),
        (
            ValueError("Try `max_model_len`, not `x`. See https://a/b for more details."),
            ["Try --max-model-len, not `x`."],
        ),
        (ValueError("first\nparagraph\n\nsecond"), ["first paragraph"]),
        (TypeError("unexpected"), ["TypeError: unexpected"]),
        (ValueError(""), ["ValueError"]),
    ],
)  # fmt: skip
def test_line_says_what_to_change(error: Exception, words: list[str]) -> None:
    line = said(error)
    assert "\n" not in line and "second" not in line and "https" not in line
    for word in words:
        assert word in line


def test_line_is_short_and_the_file_holds_the_rest(record: Path) -> None:
    error = raised(ValueError("known models: " + "model " * 1000))
    (line,) = start_error.describe(error, ARGS)
    assert len(line) < start_error.LIMIT + len(f" (traceback: {record})") + 20
    assert str(error) in record.read_text()
    first = json.loads(record.read_text().splitlines()[0])
    assert Reason(**first).process == "h2o-serve"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "Error raised in subprocess:\nTraceback ...\nNo module named 'torchvision.transforms'\n",
            "needs the Python package torchvision, which is not installed. Install it",
        ),
        ("Error raised in subprocess:\nImportError: libx.so: not found\n", "ImportError: libx.so"),
    ],
)
def test_a_model_class_that_lacks_a_package_says_which_and_how_to_get_it(
    record: Path, caplog: pytest.LogCaptureFixture, text: str, says: str
) -> None:
    class Model(BaseModel):
        name: str = Field()

        @model_validator(mode="after")
        def inspect(self) -> Model:
            # As vLLM's registry does.
            name, message = start_record.INSPECTION
            try:
                raise RuntimeError(text)
            except RuntimeError:
                logging.getLogger(name).exception(message, self.name)
            raise ValueError(
                f"Model architectures [{self.name!r}] failed to be inspected. Please check the logs for "
                "more details."
            )

    with (
        caplog.at_level(logging.DEBUG, logger=start_record.INSPECTION[0]),
        pytest.raises(ValidationError) as failed,
    ):
        Model(name="Qwen3VLForConditionalGeneration")
    (line,) = start_error.describe(failed.value, ARGS)
    assert says in line and str(record) in line
    # And no traceback on the way.
    assert "Traceback" not in caplog.text and "cannot be imported" in caplog.text
