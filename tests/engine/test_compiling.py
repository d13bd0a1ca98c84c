# SPDX-License-Identifier: Apache-2.0
"""A system that cannot compile serves all the same: a request for logprobs does not end the engine of all."""

from __future__ import annotations

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
    """A system with g++ and Python's headers, and torch for CPUs."""
    for name in ("g++", "Python.h"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cpu")
    monkeypatch.delenv("CXX", raising=False)
    # Set first, so that what the code under test sets is taken back.
    monkeypatch.setenv(environment.COMPILE, "")
    monkeypatch.delenv(environment.COMPILE)
    return tmp_path


def test_a_complete_system_compiles(system: Path) -> None:
    assert environment.switch_off_compiling() == ""
    assert environment.COMPILE not in os.environ


@pytest.mark.parametrize("lacks", ["g++", "Python.h", "my-g++"])
def test_compiling_is_off_where_a_part_is_missing(
    lacks: str, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "my-g++":
        monkeypatch.setenv("CXX", "my-g++ -O2")
    else:
        (system / lacks).unlink()
    assert lacks.removeprefix("my-") in environment.switch_off_compiling()
    assert os.environ[environment.COMPILE] == "1"


def test_an_eager_engine_on_a_cpu_compiles_nothing(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment.switch_off_compiling(eager=True) == ""
    assert os.environ[environment.COMPILE] == "1"
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cu130")
    monkeypatch.delenv(environment.COMPILE)
    assert environment.switch_off_compiling(eager=True) == ""
    assert environment.COMPILE not in os.environ


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


def test_other_builds_and_a_given_choice_are_left_alone(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (system / "g++").unlink()
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cu130")
    assert environment.switch_off_compiling() == ""
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cpu")
    monkeypatch.setenv(environment.COMPILE, "0")
    assert environment.switch_off_compiling() == ""


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
