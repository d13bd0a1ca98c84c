# SPDX-License-Identifier: Apache-2.0
"""What an import costs. Who may know whom is import-linter's business: see pyproject.toml."""

import json
from pathlib import Path

import pytest

import h2o_vllm
from tests.processes import python

ROOT = Path(h2o_vllm.__file__).parents[1]
HEAVY = {"torch", "vllm", "numba", "numpy", "transformers", "fastapi", "pydantic"}


def loaded_by(statement: str) -> set[str]:
    """The top-level modules a fresh interpreter holds after ``statement``."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    out = python("-c", code, cwd=ROOT)
    return {name.partition(".")[0] for name in json.loads(out.stdout.splitlines()[-1])}


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


def test_every_export_exists() -> None:
    for name in h2o_vllm._HOMES:
        assert getattr(h2o_vllm, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = h2o_vllm.nonsense
