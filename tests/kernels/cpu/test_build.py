# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels are built once, atomically, for this CPU; without a compiler plain torch steps in."""

import functools
import logging
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.kernels.cpu import build, reference, toolchain
from tests.processes import python

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache and an empty folder for temporary files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(toolchain, "SOURCES", sources)
    return tmp_path


@needs_compiler
def test_one_build_serves_all(place: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.library(), range(4)))
    assert len(paths) == 1
    assert set((place / "cache" / "h2o_vllm").iterdir()) == paths  # no temporary file left


@needs_compiler
def test_other_sources_are_another_library(place: Path) -> None:
    first = build.library()
    (place / "csrc" / "one.cpp").write_text('extern "C" int one() { return 2; }')
    assert build.library() != first


@needs_compiler
@pytest.mark.parametrize("cache", ["unwritable", "writable by others", "of a user without a home"])
def test_a_cache_that_cannot_be_used_is_replaced_by_temporary_files(
    place: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    if cache == "unwritable":
        (place / "cache").write_text("a file where a folder should be")
    elif cache == "writable by others":
        (place / "cache" / "h2o_vllm").mkdir(parents=True)
        (place / "cache" / "h2o_vllm").chmod(0o777)
    else:
        # A uid that is not in passwd, as containers have it.
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert build.library().is_relative_to(place / "tmp")


@needs_compiler
def test_a_compile_error_says_so(place: Path) -> None:
    (place / "csrc" / "one.cpp").write_text("this is not C++")
    with pytest.raises(OSError, match="failed"):
        build.library()


def test_without_a_compiler_the_reference_steps_in_and_says_so_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("H2O_CPU_KERNEL", raising=False)
    monkeypatch.setattr(reference, "precision", torch.float64)
    monkeypatch.delitem(sys.modules, "h2o_vllm.kernels.cpu.cpp", raising=False)
    load = functools.cache(kernels.load.__wrapped__)
    with caplog.at_level(logging.INFO, "vllm.h2o_vllm.kernels"):
        assert load() is reference
        assert load() is reference
    (record,) = caplog.records
    assert reference.precision == torch.float32
    assert record.levelname == "WARNING"
    for word in ("no C++ compiler", "apt install g++", kernels.COST):
        assert word in record.getMessage()


def test_an_implementation_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    load = kernels.load.__wrapped__
    monkeypatch.setenv("H2O_CPU_KERNEL", "reference")
    assert load() is reference
    monkeypatch.setenv("H2O_CPU_KERNEL", "numba")
    with pytest.raises(ConfigError, match="cpp, reference"):
        load()


def test_one_that_is_asked_for_is_not_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delitem(sys.modules, "h2o_vllm.kernels.cpu.cpp", raising=False)
    with pytest.raises(ConfigError, match="H2O_CPU_KERNEL=cpp cannot be had"):
        kernels.load.__wrapped__("cpp")


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "needs", "name"),
    [
        ("-mno-avx", "avx", "portable"),
        # Registers in memory: what is left untested are the instructions that use the real ones.
        ("-DH2O_EMULATE_AMX", "avx512_bf16", "AMX, emulated"),
    ],
)
def test_code_for_other_cpus_equals_the_reference(
    tmp_path: Path, option: str, needs: str, name: str
) -> None:
    """What no wheel carries a library for; the levels it carries are tested in test_prebuilt.py."""
    if needs not in build.cpu_features():
        pytest.skip(f"this CPU has no {needs}")
    environment = {"CXX": f"g++ {option}", "XDG_CACHE_HOME": str(tmp_path)}
    code = "from h2o_vllm.kernels import cpu; print(cpu.load('cpp').describe())"
    assert name in python("-c", code, environment=environment).stdout
    tests = Path(__file__).with_name("test_attend.py")
    done = python("-m", "pytest", "-q", "-k", "cpp and not long", tests, environment=environment)
    assert done.returncode == 0, done.stdout
