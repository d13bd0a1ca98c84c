# SPDX-License-Identifier: Apache-2.0
"""Directories that cannot be a model are refused in one line; what only vLLM can judge passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_vllm.errors import ConfigError
from h2o_vllm.server.model_dir import check_model_dir


def refused(model: object, load_format: str = "auto") -> str:
    with pytest.raises(ConfigError) as caught:
        check_model_dir(str(model), load_format)
    said = str(caught.value)
    assert said.startswith(f"--model {model}: ")
    return said


def test_what_cannot_be_a_model_is_refused_by_name(tmp_path: Path) -> None:
    assert "no such directory" in refused(tmp_path / "absent")
    assert "no such directory" in refused("./absent")
    assert "no such directory" in refused("~/absent")
    assert "no config.json" in refused(tmp_path)
    config = tmp_path / "config.json"
    for content in (b'{"architectures": [', b"\xff", b"[" * 200_000):
        config.write_bytes(content)
        assert "not JSON" in refused(tmp_path)
    config.write_text("{}")
    assert "no weights" in refused(tmp_path)
    check_model_dir(str(tmp_path), "dummy")
    (tmp_path / "model.safetensors").touch()
    check_model_dir(str(tmp_path), "auto")
    config.unlink()
    (tmp_path / "params.json").write_text("{}")
    check_model_dir(str(tmp_path), "auto")


@pytest.mark.parametrize("model", ["org/name", "gpt2", "s3://bucket/model", "hf:org/name"])
def test_name_on_a_hub_is_none_of_our_business(model: str) -> None:
    check_model_dir(model, "auto")


def test_file_is_vllms_to_judge(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    check_model_dir(str(tmp_path / "model.gguf"), "auto")


def test_path_that_no_system_has_is_no_traceback() -> None:
    assert "--model /" in refused("/" + "x" * 5000)
