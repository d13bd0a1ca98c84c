# SPDX-License-Identifier: Apache-2.0
"""Starts with a planted hang: each is noticed, said with its place, tried once more, else ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.live_server import LiveServer

pytestmark = pytest.mark.slow

PLUGIN = '''
"""A general plugin of vLLM, which each of its processes loads: hangs where PLANTED says, on each core."""
import multiprocessing, os, threading
from pathlib import Path


def planted(*args, **kwargs):
    if "once" not in os.environ["PLANTED"] or not Path(os.environ["PLANTED_FLAG"]).exists():
        Path(os.environ["PLANTED_FLAG"]).touch()
        threading.Event().wait()


def register():
    place, name = os.environ["PLANTED"], multiprocessing.current_process().name
    names = {"before": "MainProcess", "behind": "EngineCore", "worker": "Worker", "loading": "EngineCore"}
    wanted = names.get(place.split("-")[0])
    if wanted is None or wanted not in name:
        return
    if place.startswith("worker"):
        from vllm.v1.worker.cpu_worker import CPUWorker

        real = CPUWorker.init_device
        CPUWorker.init_device = lambda worker: (planted(), real(worker))[1]
    elif place.startswith("loading"):
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        DefaultModelLoader.load_weights = planted
    else:
        planted()
'''

SITE = """
import os, sys, threading
if os.environ.get("PLANTED") == "in" and "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    threading.Event().wait()
"""


@pytest.fixture
def plant(tmp_path: Path) -> Path:
    """A folder for ``PYTHONPATH``."""
    (tmp_path / "planted.py").write_text(PLUGIN)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    about = tmp_path / "planted-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted = planted:register\n")
    return tmp_path


@pytest.mark.parametrize(
    "place",
    [
        "loading",
        "behind-once",
        *(pytest.param(place, marks=pytest.mark.long) for place in ("in", "before", "worker-once")),
    ],
)
def test_hang_is_noticed_wherever_it_is(place: str, plant: Path, tiny: list[str]) -> None:
    environment = {
        "PYTHONPATH": str(plant),
        "PLANTED": place,
        "PLANTED_FLAG": str(plant / "flag"),
        "H2O_STILL_SECONDS": "5",
    }
    # Then the model has a process of its own.
    options = ["--distributed-executor-backend", "mp"] if place.startswith("worker") else []
    server = LiveServer(plant / "log", *tiny, *options, environment=environment)
    try:
        if place in ("before", "loading"):
            assert server.process.wait(timeout=600) == 1
            last = server.log.read_text().strip().splitlines()[-1]
            assert last.startswith("h2o-serve: error: the ") and "stands still" in last
            assert ("for the second time" in last) == (place == "loading")
        else:
            server.wait_until_up()
            assert server.log.read_text().count("; starting it once more") == 1
        said = next(line for line in server.log.read_text().splitlines() if "all stacks: " in line)
        stacks = Path(said.partition("all stacks: ")[2].partition(")")[0]).read_text()
        assert ("in planted" in stacks) == (place != "in")
    finally:
        server.kill()
    assert server.members_after(10) == []
