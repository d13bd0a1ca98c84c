# SPDX-License-Identifier: Apache-2.0
"""What deploy/setup.sh and deploy/index.sh decide, on a copy of them and without installing anything."""

import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the scripts need of a checkout, in a path with a blank."""
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "deploy", root / "deploy")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def bash(
    root: Path, script: str, *, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` after sourcing setup.sh, as the scripts that use it do."""
    script = f'set -euo pipefail; . "{root}/deploy/setup.sh"; {script}'
    return run("/bin/bash", "-c", script, cwd=cwd or "/", environment=environment)


def bare(tmp_path: Path, **programs: str) -> Path:
    """A PATH of a system that has little more than ``programs``, name to script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in "awk cat env find grep kill mkdir rm sleep tail touch".split():  # noqa: SIM905
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


APT = 'echo "$*" >>"$APT_LOG"'
NO_VENV = 'case "$2" in *ensurepip* | *ctypes*) exit 1 ;; esac'


def get_packages(
    checkout: Path, path: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    """What is said, and what apt-get is asked for."""
    asked = path / "asked"
    asked.touch()
    given = {"CXX": "", "H2O_CPU_KERNEL": "", "APT_LOG": str(asked)} | environment
    done = bash(checkout, f'PATH="{path}"; get_packages cpu', **given)
    return done, asked.read_text()


def test_a_bare_system_gets_what_is_missing_and_is_told_why(checkout: Path, tmp_path: Path) -> None:
    done, asked = get_packages(checkout, bare(tmp_path, **{"apt-get": APT, "id": "echo 0"}))
    assert done.returncode == 0, done.stderr
    assert asked.endswith(
        " install --no-install-recommends python3-venv libnuma1 g++ python3-dev\n"
    )
    assert "libnuma1 (is loaded by vLLM's CPU build)" in done.stderr


@pytest.mark.parametrize("why", ["H2O_INSTALL", "no sudo", "no apt-get"])
def test_who_may_not_install_is_told_in_one_line(checkout: Path, tmp_path: Path, why: str) -> None:
    programs = {"apt-get": APT, "id": "echo 1234" if why == "no sudo" else "echo 0"}
    if why == "no apt-get":
        del programs["apt-get"]
    path = bare(tmp_path, **programs)
    done, asked = get_packages(checkout, path, H2O_INSTALL="no" if why == "H2O_INSTALL" else "")
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "as root: apt-get install python3-venv libnuma1 g++ python3-dev" in line
    assert not asked
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("programs", "code", "said"),
    [
        # Debian's python3 without python3-venv: venv is there, ensurepip is not.
        ({"python3.12": NO_VENV}, 1, "apt-get install python3.12-venv libnuma1 g++"),
        # Without a compiler the set-up goes on.
        ({"python3": "exit 0"}, 0, "WARNING: there is no g++"),
        # A complete system is left alone.
        ({"python3": "exit 0", "g++": "exit 0"}, 0, ""),
    ],
)
def test_what_python_and_compiler_there_are_decides_what_is_missing(
    checkout: Path, tmp_path: Path, programs: dict[str, str], code: int, said: str
) -> None:
    done, asked = get_packages(checkout, bare(tmp_path, **programs), H2O_INSTALL="no")
    assert (done.returncode != 0) == bool(code) and not asked
    assert said in done.stderr and (said or not done.stderr)


def test_no_proxy_is_asked_for_servers_of_the_tests() -> None:
    assert urllib.request.proxy_bypass_environment("127.0.0.1")


def test_environment_made_by_somebody_else_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "pyvenv.cfg").write_text("home = elsewhere")
    done = bash(checkout, "new_venv")
    assert done.returncode != 0
    assert "was not made by this script" in done.stderr
    assert (checkout / ".venv" / "pyvenv.cfg").read_text() == "home = elsewhere"


def installed(checkout: Path) -> None:
    """An environment that looks finished, for the CPU build and with the test tools."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    stamp = 'for what in base test; do fingerprint $what cpu >"$venv/h2o-$what.stamp"; done'
    assert bash(checkout, stamp).returncode == 0


def test_finished_environment_is_ready_from_any_directory(checkout: Path, tmp_path: Path) -> None:
    installed(checkout)
    assert bash(checkout, "ready base cpu && ready test cpu", cwd=tmp_path).returncode == 0
    assert bash(checkout, "ready base cuda").returncode != 0


@pytest.mark.parametrize("file", ["pyproject.toml", "deploy/locks/cpu.txt"])
def test_changed_requirements_are_installed_anew(checkout: Path, file: str) -> None:
    installed(checkout)
    with (checkout / file).open("a") as text:
        text.write("\n# changed\n")
    assert bash(checkout, "ready base cpu").returncode != 0


def test_failing_step_shows_the_end_of_its_log(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    done = bash(checkout, "step 'doing a thing' '1 s' sh -c 'echo the reason; exit 3'")
    assert done.returncode != 0
    assert "the reason" in done.stderr
    assert "doing a thing failed" in done.stderr


def test_uv_uses_the_index_pip_is_configured_for(checkout: Path, tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = file:///one/simple\ntimeout = 5\n"
        "extra-index-url =\n    file:///two\n    file:///three\n"
        "find-links = /wheels /more-wheels\n"
    )
    script = f"""
        unset "${{!PIP_@}}" "${{!UV_@}}"
        export PIP_CONFIG_FILE="{config}" UV_HTTP_TIMEOUT=77
        uv_like_pip "{sys.executable}"
        printf '%s\\n' "$UV_DEFAULT_INDEX" "$UV_INDEX" "$UV_FIND_LINKS" "$UV_HTTP_TIMEOUT"
    """
    done = bash(checkout, script)
    assert done.returncode == 0, done.stderr
    index, extra, links, timeout = done.stdout.splitlines()
    assert index == "file:///one/simple"
    assert extra.split()[-2:] == ["file:///two", "file:///three"]
    assert links.split(",")[-2:] == ["/wheels", "/more-wheels"]
    # What the user has set for uv stays.
    assert timeout == "77"
