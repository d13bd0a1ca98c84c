# SPDX-License-Identifier: Apache-2.0
"""The fork server, and what an engine from it has. That it serves is shown by the live tests."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_vllm.server import engine_start, fork_server
from tests.server.live_server import ENVIRONMENT, MODEL, live_server

SCRIPT = """
import multiprocessing, os
import torch
from h2o_vllm.server import fork_server

def engine(answer):
    # With a team of threads that did not survive, this waits for ever.
    torch.set_num_threads(2)
    torch.zeros(1 << 22).add_(1)
    answer.send((os.getppid(), os.environ.get("SET_LATER"), os.environ.get("TAKEN_OUT")))

if __name__ == "__main__":
    os.environ["TAKEN_OUT"] = "1"
    fork_server.start()
    torch.set_num_threads(2)
    torch.zeros(1 << 22).add_(1)
    os.environ["SET_LATER"] = os.environ.pop("TAKEN_OUT")
    ours, theirs = multiprocessing.Pipe()
    with fork_server.engine_from_fork_server():
        process = multiprocessing.get_context("spawn").Process(target=engine, args=(theirs,))
        process.start()
    assert ours.poll(60), "the engine hangs"
    parent, later, out = ours.recv()
    process.join()
    assert (process.exitcode, later, out) == (0, "1", None)
    assert parent != os.getpid(), "forked from a process that has computed"
    print("threads:", len(os.listdir(f"/proc/{parent}/task")))
"""


@pytest.mark.slow
def test_engine_computes_though_the_server_has_computed_and_has_the_servers_environment(
    tmp_path: Path,
) -> None:
    script = tmp_path / "server.py"
    script.write_text(SCRIPT)
    # A pool of numpy's own would be threads as well.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # What is imported computes nothing, so the fork server has no team that could be missing in an engine.
    assert done.stdout.endswith("threads: 1\n")


@pytest.mark.e2e
@pytest.mark.long
def test_a_model_that_sees_starts_with_threads_of_the_users_own(tmp_path: Path) -> None:
    """vLLM tries its processor of pictures, with that many threads, in the server before its engine."""
    from tests.families.image_models import PILLOW_ALONE, save_image_model

    model = tmp_path / "llava"
    save_image_model("llava", str(model))
    paths = os.pathsep.join([str(PILLOW_ALONE), ENVIRONMENT.get("PYTHONPATH", "")])
    environment = {"OMP_NUM_THREADS": "2", "PYTHONPATH": paths}
    options = ["--model", str(model), "--served-model-name", MODEL]
    with live_server(tmp_path / "log", *options, environment=environment) as server:
        body = {"model": MODEL, "prompt": [100] * 400, "max_tokens": 8, "kv_budget": 0.5}
        assert server.post("/v1/completions", body).json()["kv_cache"]["tokens_evicted"] > 0


def test_only_the_engine_comes_from_the_fork_server() -> None:
    spawn = multiprocessing.get_context("spawn")
    usual = spawn.Process
    with fork_server.engine_from_fork_server():
        assert multiprocessing.get_context("spawn").Process is fork_server.PreloadedProcess
    assert spawn.Process is usual


@pytest.mark.parametrize(
    ("preload", "there"),
    [("", True), ("loaded", True), ("loaded:/lib/libtcmalloc.so", False)],
)
def test_engine_is_spawned_where_a_library_is_to_be_preloaded(
    preload: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's OpenMP is in this process.
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "libgomp" in line)
    monkeypatch.setenv("LD_PRELOAD", preload.replace("loaded", library))
    assert engine_start._is_preloaded() is there
