# SPDX-License-Identifier: Apache-2.0
"""What deploy/setup.sh and deploy/index.sh decide, on a copy of them and without installing anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    return subprocess.run(
        ["/bin/bash", "-c", f'set -euo pipefail; . "{root}/deploy/setup.sh"; {script}'],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd or "/",
        env=os.environ | environment,
    )


def test_no_python_is_a_clear_error(checkout: Path, tmp_path: Path) -> None:
    done = bash(checkout, f"PATH={tmp_path}; find_python")
    assert done.returncode != 0
    assert "no Python 3.11, 3.12 or 3.13 found" in done.stderr


def test_python_without_venv_names_the_package(checkout: Path, tmp_path: Path) -> None:
    # Debian without python3-venv: venv is there, ensurepip is not.
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\n')
    fake.chmod(0o755)
    done = bash(checkout, f"PATH={tmp_path}; find_python")
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr


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


def test_changed_test_lock_leaves_the_server_ready(checkout: Path) -> None:
    installed(checkout)
    (checkout / "deploy" / "locks" / "test.txt").write_text("pytest==1.0\n")
    assert bash(checkout, "ready base cpu").returncode == 0
    assert bash(checkout, "ready test cpu").returncode != 0


def test_moved_checkout_is_installed_anew(checkout: Path, tmp_path: Path) -> None:
    installed(checkout)
    moved = checkout.rename(tmp_path / "elsewhere")
    assert bash(moved, "ready base cpu").returncode != 0


def test_failing_step_shows_the_end_of_its_log(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    done = bash(checkout, "step 'doing a thing' '1 s' sh -c 'echo the reason; exit 3'")
    assert done.returncode != 0
    assert "the reason" in done.stderr
    assert "doing a thing failed" in done.stderr


@pytest.mark.parametrize("value", ["cpu", "cuda"])
def test_device_can_be_chosen(checkout: Path, value: str) -> None:
    assert bash(checkout, "device", H2O_DEVICE=value).stdout.strip() == value


def test_unknown_device_is_refused(checkout: Path) -> None:
    done = bash(checkout, "device", H2O_DEVICE="tpu")
    assert done.returncode != 0
    assert "H2O_DEVICE must be cpu or cuda, got tpu" in done.stderr


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
