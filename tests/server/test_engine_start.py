# SPDX-License-Identifier: Apache-2.0
"""When an engine is forked, and what is right in it. That it serves is shown by the live tests."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from h2o_vllm.engine.cpu import executor
from h2o_vllm.plugin import CPU_EXECUTOR
from h2o_vllm.server import engine_start


@pytest.mark.parametrize(
    ("executor_backend", "ranks", "preload", "forks"),
    [
        pytest.param(CPU_EXECUTOR, 1, "", True, id="plain"),
        pytest.param(CPU_EXECUTOR, 1, "loaded", True, id="preloaded-here"),
        pytest.param(CPU_EXECUTOR, 1, "loaded:/lib/libtcmalloc.so", False, id="another-allocator"),
        pytest.param(CPU_EXECUTOR, 2, "", False, id="ranks"),
        pytest.param("mp", 1, "", False, id="vllms-executor"),
    ],
)
def test_engine_is_forked_where_a_spawned_one_would_be_the_same(
    executor_backend: str, ranks: int, preload: str, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's OpenMP is in this process.
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "libgomp" in line)
    monkeypatch.setenv("LD_PRELOAD", preload.replace("loaded", library))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for name in executor.BINDING:
        monkeypatch.delenv(name, raising=False)
    parallel = SimpleNamespace(
        distributed_executor_backend=executor_backend, world_size=ranks, data_parallel_size=1
    )
    config: Any = SimpleNamespace(parallel_config=parallel)
    assert engine_start.may_fork(config) is forks


def test_child_has_its_threads_and_neither_signals_nor_clients_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(engine_start.METHOD, "spawn")
    listening, (wakeup, written) = socket.socket(), socket.socketpair()
    written.setblocking(False)
    before, old = torch.get_num_threads(), signal.set_wakeup_fd(written.fileno())
    try:
        torch.set_num_threads(3)
        # Fewer where a vLLM worker lives in this process: it makes that call do nothing.
        wanted = torch.get_num_threads()
        engine_start._Fork(listening).prepare()
        assert (os.environ[engine_start.METHOD], torch.get_num_threads()) == ("fork", 1)
        child = os.fork()
        if child == 0:
            right = (
                os.environ[engine_start.METHOD] == "spawn"
                and torch.get_num_threads() == wanted
                and signal.set_wakeup_fd(-1) == -1
                and listening.fileno() == -1
            )
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.environ[engine_start.METHOD] == "spawn"
        assert listening.fileno() != -1
        # A later fork is nobody's engine.
        child = os.fork()
        if child == 0:
            os._exit(0 if listening.fileno() != -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        signal.set_wakeup_fd(old)
        torch.set_num_threads(before)
        for one in (listening, wakeup, written):
            one.close()
