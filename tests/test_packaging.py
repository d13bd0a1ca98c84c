# SPDX-License-Identifier: Apache-2.0
"""What is built, what is pinned and what is written about it fit together."""

import configparser
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import h2o_vllm
from h2o_vllm.engine.support.check import VERSIONS
from tests.processes import run
from tests.wheels import build, copy_project

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ("cpu", "cuda", "test")

# Extras whose requirements each lock has to satisfy.
EXTRAS = {"cpu": ("cpu", "model"), "cuda": ("cuda", "model")}

# Asked for by a locked package, left out on purpose: see deploy/locks/compile.
LEFT_OUT = {
    "cpu": {
        "llama-cpp-python",
        "llm",
        "opencv-python-headless",
        "torchaudio",
        "torchcodec",
        "torchvision",
    },
    "cuda": {"llama-cpp-python", "llm"},
}


def locked(name: str) -> dict[str, Version]:
    """Name to version of ``deploy/locks/<name>.txt``, as this Python reads it."""
    found = {}
    for line in (ROOT / "deploy" / "locks" / f"{name}.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        if requirement.marker is None or requirement.marker.evaluate():
            found[canonicalize_name(requirement.name)] = Version(pin.version)
    return found


def tracked_files() -> list[Path]:
    """The files of the project: those git knows or would add; without git, those of our folders."""
    done = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if done.returncode == 0:
        return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]
    places = ("h2o_vllm", "deploy", "tests", "loadtest")
    return [path for place in places for path in (ROOT / place).rglob("*") if path.is_file()]


def sources() -> set[str]:
    """The package's files, relative to the repository."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "h2o_vllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, without compiled kernels; with them: tests/kernels/cpu/test_prebuilt.py."""
    folder = copy_project(tmp_path_factory.mktemp("copy"))
    return zipfile.ZipFile(build(folder, "wheel", PATH="", CXX="")[0])


def test_wheel_has_every_source_file(wheel: zipfile.ZipFile) -> None:
    assert "h2o_vllm/py.typed" in sources()
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == sources()


@pytest.mark.slow
def test_sdist_has_what_a_wheel_is_built_from(tmp_path: Path) -> None:
    archive, _ = build(copy_project(tmp_path), "sdist")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"pyproject.toml", "LICENSE", *sources()} <= names


def test_wheel_has_license_and_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"h2o_vllm-{h2o_vllm.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_wheel_has_entry_points(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(
        wheel.read(f"h2o_vllm-{h2o_vllm.__version__}.dist-info/entry_points.txt").decode()
    )
    assert dict(parser["console_scripts"]) == {"h2o-serve": "h2o_vllm.server.cli:main"}
    assert parser["vllm.general_plugins"]["h2o"] == "h2o_vllm.plugin:register"


def test_support_names_the_versions_of_vllm_that_start() -> None:
    text = (ROOT / "h2o_vllm/SUPPORT.md").read_text()
    release = ".".join(h2o_vllm.__version__.split(".")[:2])
    (row,) = re.findall(rf"^\| {re.escape(release)} \| (.*) \| (.*) \|$", text, re.MULTILINE)
    for device, named in zip(("cpu", "cuda"), row, strict=True):
        (major, low), (_, high) = VERSIONS[device]
        assert named == ", ".join(f"{major}.{minor}" for minor in range(low, high)), device


@pytest.mark.parametrize("lock", EXTRAS)
def test_lock_alone_or_with_the_test_lock_satisfies_pyproject(lock: str) -> None:
    extras, pins = PROJECT["optional-dependencies"], locked(lock)
    served = [*PROJECT["dependencies"], *(one for extra in EXTRAS[lock] for one in extras[extra])]
    both = pins | locked("test")
    for known, wanted in ((pins, served), (both, [*extras["test"], *extras["loadtest"]])):
        for requirement in map(Requirement, wanted):
            assert known[canonicalize_name(requirement.name)] in requirement.specifier


def test_test_lock_adds_only() -> None:
    assert not locked("test").keys() & (locked("cpu").keys() | locked("cuda").keys())


def test_cpu_lock_is_complete() -> None:
    """Installed with --no-deps: a requirement of a requirement that is missing shows only here."""
    from importlib.metadata import PackageNotFoundError, distribution

    pins = locked("cpu")
    for name in pins:
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            pytest.skip(f"the environment is not that of the cpu lock: no {name}")
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed = canonicalize_name(requirement.name)
                if needed not in LEFT_OUT["cpu"]:
                    assert pins[needed] in requirement.specifier, f"{name} needs {requirement}"


@pytest.mark.parametrize("lock", EXTRAS)
def test_lock_leaves_out_what_breaks_it(lock: str) -> None:
    assert not locked(lock).keys() & LEFT_OUT[lock]


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_names_no_host_and_no_path(lock: str) -> None:
    text = (ROOT / "deploy" / "locks" / f"{lock}.txt").read_text()
    assert not re.search(r"://|@|^-|/(home|opt|root|tmp|work)\b", text, re.MULTILINE)


def test_every_source_file_names_its_license() -> None:
    scripts = {"deploy/quickstart", "deploy/locks/compile", "tests/run", ".ci/run"}
    for path in tracked_files():
        name = path.relative_to(ROOT).as_posix()
        if name in scripts or path.suffix in {".py", ".sh", ".cpp", ".hpp", ".js", ".css", ".html"}:
            head = path.read_text().splitlines()[:3]
            assert any("SPDX-License-Identifier: Apache-2.0" in line for line in head), name
