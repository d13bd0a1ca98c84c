# SPDX-License-Identifier: Apache-2.0
"""Build the package as an installer would, from a copy: a build writes beside its sources."""

import shutil
from pathlib import Path

from tests.processes import python

ROOT = Path(__file__).parents[1]


def copy_project(folder: Path) -> Path:
    """All that a build needs, into ``folder``."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "h2o_vllm", folder / "h2o_vllm", ignore=ignore)
    return folder


def build(folder: Path, what: str, **environment: str) -> tuple[Path, str]:
    """The ``wheel``, ``editable`` wheel or ``sdist`` of a copy, and what the build said."""
    # As pip would with --no-build-isolation, which needs no pip here.
    code = f"import setuptools.build_meta as b; print(b.build_{what}('.'))"
    done = python("-c", code, cwd=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1], done.stdout + done.stderr
