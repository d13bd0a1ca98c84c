# SPDX-License-Identifier: Apache-2.0
"""What a start shows: few lines of vLLM's, and of one that failed a line, whichever process it was."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, Field, ValidationError

from h2o_vllm.config.keys import QUIET, START_RECORD
from h2o_vllm.engine import start_log
from h2o_vllm.errors import ConfigError
from tests.processes import python


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What the handler of vLLM's loggers lets through, tracebacks included."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(self.format(record))

    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [Handler()])
    for name in (QUIET, START_RECORD, "TORCH_CPP_LOG_LEVEL", "PYTHONWARNINGS"):
        # Set first, so that what the code under test sets is taken back.
        monkeypatch.setenv(name, "")
    for name in start_log.ASKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.INFO)
    yield said
    logger.setLevel(level)


def speak() -> None:
    for name, level in (
        ("vllm.entrypoints.launchers.launcher", logging.INFO),
        ("vllm.v1.worker.cpu_worker", logging.WARNING),
        ("vllm.v1.core.kv_cache_utils", logging.INFO),
        ("vllm.h2o_vllm.server.serve", logging.INFO),
    ):
        logging.getLogger(name).log(level, name.rpartition(".")[2])


def test_a_start_shows_what_takes_long_or_says_how_much_fits(log: list[str]) -> None:
    assert start_log.prepare()
    start_log.begin(log=False, keep=False)
    start_log.install()
    speak()
    assert log == ["kv_cache_utils", "serve"]
    start_log.end()
    speak()
    assert len(log) == 2 + 4


@pytest.mark.parametrize("quiet", [True, False])
def test_a_spawned_process_hides_warnings_before_vllm_logs_too(quiet: bool) -> None:
    code = """
import logging
import h2o_vllm.server.cli
logging.getLogger("vllm.triton_utils.importing").warning("no CPU backend")
logging.getLogger("vllm.config").error("an error")
logging.getLogger("another").warning("of another")
"""
    done = python("-c", code, environment={QUIET: "1" if quiet else ""})
    expected = ["an error", "of another"]
    assert done.stderr.splitlines() == (expected if quiet else ["no CPU backend", *expected])


def fail(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
        return caught


ENGINE_FAILED = RuntimeError("Engine core initialization failed. See root cause above.")


def test_tracebacks_of_a_start_are_in_the_file_and_the_reason_in_the_line(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_log.begin(log=False, keep=False)
    file = Path(os.environ[START_RECORD])
    assert file.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with monkeypatch.context() as worker:
        worker.setattr(start_log, "_is_server", lambda: False)
        fail(ValueError("too little\nmemory"))
        fail(RuntimeError("what it led to"))
        print("what Python says at the end", file=sys.stderr)
    assert log == ["EngineCore failed to start."] * 2
    line = start_log.failed(ENGINE_FAILED)
    assert line == f"ValueError: too little memory (traceback: {file})"
    text = file.read_text()
    for part in ("raise error", "what it led to", "what Python says", str(ENGINE_FAILED)):
        assert part in text


class Limits(BaseModel):
    max_num_seqs: int = Field(1, ge=1)


def test_a_reason_is_one_short_line() -> None:
    assert (
        start_log.in_one_line(ConfigError("--kv-budget 7: too\nmuch")) == "--kv-budget 7: too much"
    )
    assert len(start_log.in_one_line(ValueError("model " * 1000))) < start_log.LIMIT + 20
    with pytest.raises(ValidationError) as found:
        Limits(max_num_seqs=0)
    said = "--max-num-seqs: Input should be greater than or equal to 1"
    assert start_log.in_one_line(found.value) == said


def test_nothing_is_left_behind_a_process_that_leaves() -> None:
    """Python's resource tracker too has ended when its parent has."""
    code = """
import os
from multiprocessing import resource_tracker
from h2o_vllm.server.launch import leave
resource_tracker.ensure_running()
if os.fork() == 0:
    os._exit(0)
print(resource_tracker._resource_tracker._pid, flush=True)
leave(7)
"""
    done = python("-c", code)
    assert done.returncode == 7
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
