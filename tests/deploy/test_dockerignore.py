# SPDX-License-Identifier: Apache-2.0
"""The build context holds what the Dockerfile copies, and nothing that is large or private."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest

from tests.deploy.test_manifests import dockerfile_targets
from tests.test_packaging import tracked_files

ROOT = Path(__file__).parents[2]
RULES = [
    line
    for line in (ROOT / ".dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]

KEPT_OUT = (
    ".git/config",
    ".venv/bin/python",
    ".ruff_cache/0.14.0/1",
    "h2o_vllm/kernels/__pycache__/reference.cpython-311.pyc",
    "h2o_vllm/.mypy_cache/3.11/cache.json",
    "h2o_vllm.egg-info/PKG-INFO",
    "loadtest/results/published.csv",
    "tests/run",
    "deploy/.env",
    "notes.txt",
)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern of .dockerignore names ``path`` or a folder above it."""
    parts = re.split(r"(\*\*/|\*)", pattern)
    words = {"**/": "(?:.*/)?", "*": "[^/]*"}
    regex = "".join(words.get(part, re.escape(part)) for part in parts)
    above = [path, *map(str, PurePosixPath(path).parents)]
    return any(re.fullmatch(regex, one) for one in above if one != ".")


def ignored(path: str) -> bool:
    """Docker's rule: the last pattern that matches decides."""
    found = [rule for rule in RULES if matches(rule.removeprefix("!"), path)]
    return bool(found) and not found[-1].startswith("!")


@pytest.mark.parametrize("path", KEPT_OUT)
def test_context_leaves_out(path: str) -> None:
    assert ignored(path)


def test_context_holds_every_file_that_is_copied() -> None:
    copied = {
        source
        for instructions in dockerfile_targets().values()
        for word, rest in instructions
        if word == "COPY"
        for source in [part for part in rest.split() if not part.startswith("--")][:-1]
    }
    assert "h2o_vllm" in copied
    for file in tracked_files():
        name = file.relative_to(ROOT).as_posix()
        # Pictures of a page that is read elsewhere.
        if file.suffix != ".png" and any(PurePosixPath(name).is_relative_to(s) for s in copied):
            assert not ignored(name), name
