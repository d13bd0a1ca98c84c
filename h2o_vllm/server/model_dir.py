# SPDX-License-Identifier: Apache-2.0
"""Look at a model's directory before vLLM does. Runs in the process the user starts; stdlib only.

vLLM takes a path that does not exist for a name on a hub, and says so in the words of the hub's client; a
directory without weights it notices in the engine, half a minute later. Both in pages of traceback.
"""

from __future__ import annotations

import json
from pathlib import Path

from h2o_vllm.errors import ConfigError

__all__ = ["check_model_dir"]

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
OTHER_CONFIGS = ("params.json",)
"""Mistral's own format."""


def check_model_dir(model: str, load_format: str) -> None:
    """Refuse what cannot be a model; what looks like a name on a hub, or is a file, is vLLM's to judge.

    Args:
        model: as ``--model`` got it.
        load_format: as ``--load-format``; weights are looked for with ``auto`` only.

    Raises:
        ConfigError: names the directory and what is wrong with it.
    """
    path = Path(model)
    try:
        if not path.exists():
            if path.is_absolute() or model.startswith((".", "~")):
                raise ConfigError(f"--model {model}: no such directory")
            return
        if path.is_dir():
            _check(path, model, load_format)
    except OSError as error:
        raise ConfigError(f"--model {model}: {error.strerror or error}") from None


def _check(path: Path, model: str, load_format: str) -> None:
    config = path / "config.json"
    if config.exists():
        try:
            json.loads(config.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--model {model}: its config.json is not JSON: {error}") from None
    elif not any((path / name).exists() for name in OTHER_CONFIGS):
        raise ConfigError(f"--model {model}: the directory has no config.json")
    if load_format == "auto" and not any(file.suffix in WEIGHTS for file in path.rglob("*")):
        raise ConfigError(f"--model {model}: no weights in it (no {', '.join(WEIGHTS)})")
