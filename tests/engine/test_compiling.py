# SPDX-License-Identifier: Apache-2.0
"""A system that cannot compile serves all the same: a request for logprobs does not end the engine of all."""

import os
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from h2o_vllm.engine.cpu import environment
from h2o_vllm.server import cli
from tests.engine.conftest import run_engine


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system with g++ and Python's headers."""
    for name in ("g++", "Python.h"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    # Set first, so that what the code under test sets is taken back.
    monkeypatch.setenv(environment.COMPILE, "")
    monkeypatch.delenv(environment.COMPILE)
    return tmp_path


@pytest.mark.parametrize(
    ("lacks", "torch", "given", "eager", "said", "switch"),
    [
        ("", "2.13.0+cpu", {}, False, "", None),
        ("g++", "2.13.0+cpu", {}, False, "g++", "1"),
        ("Python.h", "2.13.0+cpu", {}, False, "Python.h", "1"),
        ("", "2.13.0+cpu", {"CXX": "my-g++ -O2"}, False, "g++", "1"),
        ("g++", "2.13.0+cpu", {environment.COMPILE: "0"}, False, "", "0"),
        ("g++", "2.13.0+cu130", {}, False, "", None),
        ("", "2.13.0+cpu", {}, True, "", "1"),
        ("", "2.13.0+cu130", {}, True, "", None),
    ],
)
def test_compiling_is_off_where_a_part_is_missing_or_the_engine_of_a_cpu_is_eager(
    system: Path,
    monkeypatch: pytest.MonkeyPatch,
    lacks: str,
    torch: str,
    given: dict[str, str],
    eager: bool,
    said: str,
    switch: str | None,
) -> None:
    if lacks:
        (system / lacks).unlink()
    monkeypatch.setattr(metadata, "version", lambda _: torch)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    answer = environment.switch_off_compiling(eager=eager)
    assert said in answer and bool(said) == bool(answer)
    assert os.environ.get(environment.COMPILE) == switch


@pytest.mark.parametrize(
    ("arguments", "eager"),
    [
        ([], False),
        (["--enforce-eager", "--port", "1"], True),
        (["--enforce_eager"], True),
        (["--enforce-eager", "--no-enforce-eager"], False),
        (["--no-enforce-eager", "--enforce-eager"], True),
    ],
)
def test_the_last_option_says_whether_an_engine_is_eager(arguments: list[str], eager: bool) -> None:
    assert cli._is_eager(arguments) is eager


@pytest.mark.e2e
@pytest.mark.long
def test_logprobs_are_answered_where_nothing_can_be_compiled(
    model_dir: str, text_tokens: list[int], tmp_path: Path
) -> None:
    variables = {
        environment.COMPILE: "",
        "CXX": "no-such-compiler",
        "H2O_CPU_KERNEL": "reference",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "VLLM_CACHE_ROOT": str(tmp_path),
    }
    (result,) = run_engine(
        model_dir, [text_tokens[:40]], h2o={}, environment=variables, logprobs=2, max_tokens=3
    )
    assert len(result["logprobs"]) == 3
