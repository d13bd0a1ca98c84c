# SPDX-License-Identifier: Apache-2.0
"""Who may know whom (the direction rule), and what an import costs."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import h2o_vllm

PACKAGE = Path(h2o_vllm.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

MAY_NAME_VLLM = (
    "blocks/manager.py",
    "blocks/spec.py",
    "engine/",
    "metrics/stat_logger.py",
    "plugin.py",
    "server/",
)
HEAVY = {"torch", "vllm", "numba", "numpy", "transformers", "fastapi", "pydantic"}


def loaded_by(statement: str) -> set[str]:
    """The top-level modules a fresh interpreter holds after ``statement``."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return {name.partition(".")[0] for name in json.loads(out.stdout.splitlines()[-1])}


def imported_names(path: Path) -> Iterator[str]:
    """Every absolute module name that ``path`` imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


@pytest.mark.parametrize(
    "statement",
    [
        "import h2o_vllm",
        "from h2o_vllm import H2OConfig, ConfigError",
        "import h2o_vllm.models",
    ],
)
def test_importing_the_package_loads_nothing_heavy(statement: str) -> None:
    assert not loaded_by(statement) & HEAVY


def test_policy_and_kernels_work_without_vllm() -> None:
    blocked = "import sys; sys.modules['vllm'] = None\n"
    loaded_by(blocked + "import h2o_vllm.policy, h2o_vllm.kernels.reference, h2o_vllm.blocks.plan")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_vllm_is_named_only_by_its_adaptors(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    if not name.startswith(MAY_NAME_VLLM):
        assert "vllm" not in {module.partition(".")[0] for module in imported_names(path)}


def test_every_export_exists() -> None:
    for name in h2o_vllm.__all__:
        assert getattr(h2o_vllm, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = h2o_vllm.nonsense


def test_imports_point_only_downwards() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
