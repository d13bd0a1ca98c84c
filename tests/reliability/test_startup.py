# SPDX-License-Identifier: Apache-2.0
"""Starts that cannot work: one clear message, and an exit code that is not 0.

What the command line alone can tell is in ``tests/server/test_cli.py``.
"""

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_vllm.blocks.counts.budget import budget_tokens
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.config.settings import OPTIONS
from h2o_vllm.errors import ConfigError
from loadtest.common.tiny_model import make_tiny_model
from tests.processes import python

pytestmark = pytest.mark.slow


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.floats(0, 1), st.integers(1, 4096),
    st.text(max_size=20), st.lists(st.integers(), max_size=2), st.just("h2o"), st.just(10**400),
)  # fmt: skip


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([row.name for row in OPTIONS]), anything))
def test_any_start_up_value_works_or_is_refused_by_its_flag(values: dict[str, Any]) -> None:
    said = None
    try:
        config = H2OConfig.from_mapping(values)
    except ConfigError as error:
        said = str(error)
    if said is not None:
        assert any(f"--{name.replace('_', '-')}" in said for name in values), said
        assert len(said) < 400
        return
    assert H2OConfig.from_mapping(config.to_mapping()) == config
    # Whoever asks for nothing gets something that can be computed with.
    for seen in (1, 1000, 10**6):
        kept = budget_tokens(resolve_for(config, None, seen), seen)
        assert 1 <= kept <= seen and math.isfinite(kept)


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    """A start that has to fail, with what a user would see of it."""
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = ("-m", "h2o_vllm.server.cli", "--port", "0", "--enforce-eager", *options)
    return python(*command, environment=environment, timeout=300)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="engine"),
        pytest.param(["--distributed-executor-backend", "mp"], id="worker", marks=pytest.mark.long),
    ],
)
def test_failed_start_of_any_process_is_one_line_and_a_file(
    tmp_path: Path, options: list[str]
) -> None:
    model = make_tiny_model(tmp_path)
    (model / "model.safetensors").write_bytes(bytes(1000))
    done = serve("--model", str(model), "--skip-tokenizer-init", *options)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("h2o-serve: error: SafetensorError: ")
    file = Path(last.rpartition("(traceback: ")[2].removesuffix(")"))
    try:
        assert "Traceback (most recent call last)" in file.read_text()
    finally:
        file.unlink()


@pytest.mark.long
def test_debugging_shows_the_traceback_and_says_the_line_all_the_same(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    done = serve("--model", str(model), "--max-model-len", "9999999", "--log-level", "DEBUG")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("h2o-serve: error: ") and "max_model_len (9999999)" in last
    assert "(traceback: " not in last
