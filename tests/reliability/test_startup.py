# SPDX-License-Identifier: Apache-2.0
"""Starts that cannot work: one clear message, an exit code that is not 0, nothing half-written used.

What the command line alone can tell is in ``tests/server/test_cli.py``, what the store of the embedded model
promises in ``tests/test_models.py``; here the real thing is started, killed, and refused its disk.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_vllm.blocks.budget import budget_tokens
from h2o_vllm.config.options import OPTIONS, H2OConfig
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.errors import ConfigError
from h2o_vllm.models import DEFAULT_MODEL_NAME
from loadtest.common.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

MODELS = [sys.executable, "-m", "h2o_vllm.models"]
SERVE = [sys.executable, "-m", "h2o_vllm.server.cli"]


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.floats(0, 1),
    st.integers(1, 4096),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=2),
    st.just("h2o"),
    st.just(10**400),
)


@settings(max_examples=2000, deadline=None, derandomize=True)
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


def start(command: list[str], cache: Path, file_limit: int | None = None) -> subprocess.Popen[str]:
    """Run ``command`` with a cache of its own, in which no file may grow beyond ``file_limit`` bytes."""

    def limit() -> None:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "VLLM_LOGGING_LEVEL": "ERROR"},
        preexec_fn=limit,  # noqa: PLW1509 - the one process here that has no threads yet
    )


def made(cache: Path) -> list[str]:
    """What a conversion left, its lock excepted."""
    folder = cache / "h2o_vllm" / "models"
    return sorted(p.name for p in folder.glob("*") if not p.name.endswith(".lock"))


def test_disk_that_fills_up_is_named_and_nothing_stays(tmp_path: Path) -> None:
    process = start(MODELS, tmp_path, file_limit=20 << 20)
    out, err = process.communicate(timeout=300)
    assert process.returncode in (1, 2)
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert "cannot prepare" in last and "XDG_CACHE_HOME" in last
    assert str(tmp_path) in last
    assert "Traceback" not in err
    assert made(tmp_path) == []


def test_after_a_killed_conversion_two_starts_at_once_make_one_good_model(tmp_path: Path) -> None:
    killed = start(MODELS, tmp_path)
    deadline = time.monotonic() + 300
    while not any(name.endswith(".part") for name in made(tmp_path)):
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    assert all(name.endswith(".part") for name in made(tmp_path))
    both = [start(MODELS, tmp_path) for _ in range(2)]
    results = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len({out for out, _ in results}) == 1
    assert sum("h2o_vllm: prepared " in err for _, err in results) == 1
    (name,) = made(tmp_path)
    assert name.startswith(DEFAULT_MODEL_NAME) and not name.endswith(".part")
    from safetensors import safe_open

    path = tmp_path / "h2o_vllm" / "models" / name / "model.safetensors"
    with safe_open(path, "pt") as weights:
        assert len(list(weights.keys())) == 272


def test_bad_model_directory_is_one_line(tmp_path: Path) -> None:
    """The rest of what a directory can be is in ``tests/server/test_model_dir.py``."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    done = subprocess.run(
        [*SERVE, str(model)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"h2o-serve: error: --model {model}: no ")
    assert "Traceback" not in done.stderr


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    """A start that has to fail, with what a user would see of it."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [*SERVE, "--port", "0", "--enforce-eager", *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param([], "its weights cannot be loaded", id="engine"),
        pytest.param(
            ["--distributed-executor-backend", "mp"],
            "its weights cannot be loaded",
            id="worker",
            marks=pytest.mark.long,
        ),
        pytest.param(["--max-model-len", "9999999"], "max_model_len (9999999)", id="server"),
    ],
)
def test_failed_start_of_any_process_is_one_line_and_a_file(
    tmp_path: Path, options: list[str], says: str
) -> None:
    model = make_tiny_model(tmp_path)
    (model / "model.safetensors").write_bytes(bytes(1000))
    done = serve("--model", str(model), "--skip-tokenizer-init", *options)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("h2o-serve: error: ") and says in last
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
