# SPDX-License-Identifier: Apache-2.0
"""What .ci/run runs in: nothing that an earlier run has left can be found there."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent

WARM = """
    HF_ASSETS_CACHE HF_HOME HF_HUB_CACHE HF_MODULES_CACHE HF_XET_CACHE HUGGINGFACE_ASSETS_CACHE
    HUGGINGFACE_HUB_CACHE TRANSFORMERS_CACHE TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR TORCH_HOME
    TRITON_CACHE_DIR TRITON_DUMP_DIR TRITON_HOME TRITON_OVERRIDE_DIR NUMBA_CACHE_DIR VLLM_ASSETS_CACHE
    VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_LORA_RESOLVER_CACHE_DIR VLLM_MEDIA_CACHE VLLM_MODEL_REDIRECT_PATH
    VLLM_TUNED_CONFIG_FOLDER VLLM_XLA_CACHE_PATH OUTLINES_CACHE_DIR TIKTOKEN_CACHE_DIR MPLCONFIGDIR
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_STATE_HOME PYTHONPATH PYTHONPYCACHEPREFIX LD_LIBRARY_PATH
    H2O_CUDA_TRITON WHATEVER_COMES_NEXT HOME TMPDIR TEMP TMP
""".split()  # noqa: SIM905
"""Folders by which vLLM, its libraries, Python and we find what is there already."""

PASSED = {
    "PIP_FIND_LINKS": "/wheels",
    "UV_HTTP_TIMEOUT": "77",
    "https_proxy": "http://proxy:1",
    "no_proxy": "intern",
    "SSL_CERT_FILE": "/certificates",
    "LC_ALL": "C.UTF-8",
    "H2O_INSTALL": "no",
}


def ci(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as .ci/run runs its checks, for somebody who has ``environment``."""
    return subprocess.run(
        ["/bin/bash", str(ROOT / ".ci/run"), *command],
        capture_output=True, text=True, check=False, env=environment, cwd="/",
    )  # fmt: skip


def test_ci_begins_with_nothing_wherever_something_is(tmp_path: Path) -> None:
    (tmp_path / "left").touch()
    planted = os.environ | dict.fromkeys(WARM, str(tmp_path)) | PASSED
    planted.pop("UV_CACHE_DIR", None)
    script = 'for name in $1; do if [[ -e "${!name:-$HOME}/left" ]]; then echo "$name"; fi; done'
    depends = ["bash", "-c", script, "-", " ".join(WARM)]
    warm = subprocess.run(depends, capture_output=True, text=True, check=True, env=planted)
    assert warm.stdout.split() == WARM
    done = ci(planted, *depends)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    seen = dict(line.split("=", 1) for line in ci(planted, "env").stdout.splitlines())
    assert seen.keys().isdisjoint({*WARM} - {"HOME", "TMPDIR"})
    # Packages are kept: they are what the locks name, whoever got them.
    assert seen.pop("UV_CACHE_DIR") == f"{tmp_path}/uv"
    assert PASSED.items() - {("no_proxy", "intern")} <= seen.items()
    assert seen["no_proxy"] == seen["NO_PROXY"] == "intern,127.0.0.1,localhost"
    assert [path.name for path in tmp_path.iterdir()] == ["left"], "it leaves nothing behind"
