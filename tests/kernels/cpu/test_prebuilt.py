# SPDX-License-Identifier: Apache-2.0
"""A wheel carries libraries; the best one that fits is loaded, any other is refused and built from source."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from h2o_vllm.errors import ConfigError
from h2o_vllm.kernels.cpu import build, prebuilt, toolchain
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
    monkeypatch.delenv("H2O_CPU_BUILD", raising=False)
    caplog.set_level(logging.INFO, "vllm.h2o_vllm.kernels")
    return tmp_path / "lib"


def test_a_wheel_carries_a_library_for_each_level(quick: Path) -> None:
    names = {path.name for path in (quick / "lib").iterdir()}
    assert names == {toolchain.MANIFEST, *(f"h2o-{level}.so" for level in toolchain.LEVELS)}


def test_the_best_one_that_fits_is_loaded(carried: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert prebuilt.fitting() == carried / f"h2o-{best()}.so"
    library = prebuilt.load()
    assert library is not None
    assert library.one() == 1
    assert not caplog.records


@pytest.mark.parametrize("level", toolchain.LEVELS)
def test_a_lesser_cpu_gets_a_lesser_one(
    carried: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: {*toolchain.LEVELS[level].needs, "sse2"})
    assert prebuilt.fitting() == carried / f"h2o-{level}.so"


def change_source(lib: Path, _: pytest.MonkeyPatch) -> None:
    source = lib.parent / "csrc" / "one.cpp"
    source.write_text(source.read_text() + "\n// changed")


def damage(lib: Path, _: pytest.MonkeyPatch) -> None:
    path = lib / f"h2o-{best()}.so"
    path.write_bytes(path.read_bytes()[:-100])


def lose(lib: Path, _: pytest.MonkeyPatch) -> None:
    (lib / f"h2o-{best()}.so").unlink()


def move_to_arm(lib: Path, _: pytest.MonkeyPatch) -> None:
    text = (lib / toolchain.MANIFEST).read_text()
    (lib / toolchain.MANIFEST).write_text(text.replace("x86_64", "aarch64"))


def forget_manifest(lib: Path, _: pytest.MonkeyPatch) -> None:
    (lib / toolchain.MANIFEST).write_text("{")


def older_cpu(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: {"sse2", "avx"})


def not_loadable(lib: Path, _: pytest.MonkeyPatch) -> None:
    """As on a system that lacks a symbol it needs: the loader refuses."""
    (lib / f"h2o-{best()}.so").write_bytes(NO_LIBRARY)
    manifest = json.loads((lib / toolchain.MANIFEST).read_text())
    manifest["libraries"][best()]["sha256"] = hashlib.sha256(NO_LIBRARY).hexdigest()
    (lib / toolchain.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (change_source, "other sources"),
        (damage, "damaged"),
        (lose, "No such file"),
        (move_to_arm, "for aarch64"),
        (forget_manifest, "cannot be read"),
        (older_cpu, "can run none"),
        (not_loadable, "invalid ELF"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    carried: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    spoil(carried, monkeypatch)
    assert prebuilt.load() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert reason in record.getMessage()


def test_the_switch_builds_from_source(
    carried: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("H2O_CPU_BUILD", "source")
    assert prebuilt.load() is None
    assert not caplog.records
    monkeypatch.setenv("H2O_CPU_BUILD", "never")
    with pytest.raises(ConfigError, match="H2O_CPU_BUILD must be source or unset, got 'never'"):
        prebuilt.load()


@pytest.mark.slow
def test_without_a_compiler_a_wheel_is_pure(tmp_path: Path) -> None:
    """With the switch, too: tests/test_packaging.py."""
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
    """Changed sources in it do: then the library is built once more."""
    code = "from h2o_vllm.kernels import cpu; print(cpu.__file__, cpu.describe())"
    environment = os.environ | {"PYTHONPATH": str(real), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def told(**more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment | more, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        assert str(real) in done.stdout
        return done.stdout

    assert "C++ A" in told(PATH="", CXX="")
    assert not (tmp_path / "cache" / "h2o_vllm").exists()
    with (real / "h2o_vllm" / "kernels" / "cpu" / "csrc" / "evict.cpp").open("a+") as source:
        size = source.tell()
        source.write("// changed\n")
        source.flush()
        assert "plain torch" in told(PATH="", CXX="")
        assert "C++ A" in told()
        source.truncate(size)
    assert len(list((tmp_path / "cache" / "h2o_vllm").iterdir())) == 1


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
    environment = {key: text for key, text in os.environ.items() if key != "H2O_CPU_BUILD"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
