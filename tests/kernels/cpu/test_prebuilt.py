# SPDX-License-Identifier: Apache-2.0
"""A wheel carries libraries; the best one that fits the CPU is loaded, else one is built from source."""

import logging
import shutil
import zipfile
from pathlib import Path

import pytest

from h2o_vllm.kernels.cpu import build, toolchain
from tests.processes import python
from tests.wheels import build as build_package
from tests.wheels import copy_project

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif("avx2" not in build.cpu_features(), reason="needs a CPU with AVX2"),
]

NO_LIBRARY = b"not a library, " * 1000


def best() -> str:
    """The level of this CPU."""
    return next(
        n for n, level in toolchain.LEVELS.items() if build.cpu_features() >= {*level.needs}
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package from a wheel whose sources are one line: compiled in a moment."""
    folder = copy_project(tmp_path_factory.mktemp("quick"))
    sources = folder / "h2o_vllm" / "kernels" / "cpu" / "csrc"
    for path in sources.iterdir():
        path.unlink()
    (sources / "one.cpp").write_text(
        '#include <omp.h>\nextern "C" int one() { return omp_get_max_threads() > 0; }'
    )
    wheel, _ = build_package(folder, "wheel")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked" / "h2o_vllm" / "kernels" / "cpu"


@pytest.fixture
def carried(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """A copy of its libraries and sources, in the place of ours; returns the folder of libraries."""
    shutil.copytree(quick / "lib", tmp_path / "lib")
    shutil.copytree(quick / "csrc", tmp_path / "csrc")
    monkeypatch.setattr(toolchain, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setattr(toolchain, "SOURCES", tmp_path / "csrc")
    caplog.set_level(logging.INFO, "vllm.h2o_vllm.kernels")
    return tmp_path / "lib"


def test_a_wheel_carries_a_library_for_each_level(quick: Path) -> None:
    names = {path.name for path in (quick / "lib").iterdir()}
    assert names == {f"h2o-{level}.so" for level in toolchain.LEVELS}


def test_the_best_one_that_fits_is_loaded(carried: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert build.prebuilt() == carried / f"h2o-{best()}.so"
    assert build.load().one() == 1
    assert not caplog.records


@pytest.mark.parametrize("level", toolchain.LEVELS)
def test_a_lesser_cpu_gets_a_lesser_one(
    carried: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: {*toolchain.LEVELS[level].needs, "sse2"})
    assert build.prebuilt() == carried / f"h2o-{level}.so"


def test_an_older_cpu_gets_none(carried: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert carried.is_dir()
    monkeypatch.setattr(build, "cpu_features", lambda: {"sse2", "avx"})
    assert build.prebuilt() is None


def test_one_that_cannot_be_loaded_is_built(
    carried: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a system that lacks a symbol it needs: the loader refuses."""
    library = carried / f"h2o-{best()}.so"
    monkeypatch.setattr(build, "library", lambda: library.with_name("built.so"))
    shutil.copy(library, carried / "built.so")
    library.write_bytes(NO_LIBRARY)
    assert build.load().one() == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "invalid ELF" in record.getMessage()


@pytest.mark.slow
def test_without_a_compiler_a_wheel_is_pure(tmp_path: Path) -> None:
    wheel, said = build_package(copy_project(tmp_path), "wheel", PATH="", CXX="")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "/lib/" in name]
    assert "carries no compiled kernels" in said


@pytest.mark.slow
def test_an_editable_install_compiles_nothing(tmp_path: Path) -> None:
    called, compiler = tmp_path / "called", tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ntouch '{called}'; exit 1\n")
    compiler.chmod(0o755)
    folder = copy_project(tmp_path)
    build_package(folder, "editable", CXX=str(compiler))
    assert not called.exists()
    build_package(folder, "wheel", CXX=str(compiler))
    assert called.exists()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package from the wheel that users get."""
    folder = copy_project(tmp_path_factory.mktemp("real"))
    wheel, _ = build_package(folder, "wheel")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.mark.long
def test_the_installed_package_needs_no_compiler(real: Path, tmp_path: Path) -> None:
    code = "from h2o_vllm.kernels import cpu; print(cpu.__file__, cpu.describe())"
    environment = {"PYTHONPATH": str(real), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {"PATH": "", "CXX": ""}
    done = python("-c", code, cwd=tmp_path, environment=environment)
    assert str(real) in done.stdout and "C++ A" in done.stdout
    assert not (tmp_path / "cache" / "h2o_vllm").exists()


@pytest.mark.long
@pytest.mark.parametrize("level", toolchain.LEVELS)
def test_every_level_equals_the_reference(real: Path, level: str) -> None:
    if not build.cpu_features() >= {*toolchain.LEVELS[level].needs}:
        pytest.skip(f"this CPU has no {level}")
    tests = Path(__file__).with_name("test_attend.py")
    code = f"""
import sys, pathlib, pytest
from h2o_vllm.kernels.cpu import toolchain
toolchain.LIBRARIES = pathlib.Path({str(real)!r}) / "h2o_vllm/kernels/cpu/lib"
toolchain.LEVELS = {{{level!r}: toolchain.LEVELS[{level!r}]}}
from h2o_vllm.kernels.cpu import cpp
assert {level!r} in cpp._library._name, cpp._library._name
sys.exit(pytest.main(["-q", "-k", "cpp and not long", {str(tests)!r}]))
"""
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
