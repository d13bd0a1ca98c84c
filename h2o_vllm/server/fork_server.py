# SPDX-License-Identifier: Apache-2.0
"""A fork server that has imported what an engine needs. Started by ``h2o-serve``; no torch.

vLLM spawns its engine on CPU (0.32): a new Python imports for seconds what the server has imported already.
A fork of the server itself would be faster and may hang: a process that has computed has OpenMP threads,
which do not survive a fork. A fork server imports while the server does, never computes, and is the parent of
the engine (``multiprocessing``'s start method ``forkserver``).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver
from typing import Any

from h2o_vllm.engine.compiling import has_cpu_torch

__all__ = ["PreloadedProcess", "engine_from_fork_server", "start", "started"]

PRELOAD = "h2o_vllm.engine.preload"

_started = False


def start() -> None:
    """Begin to import what an engine needs, if this is an installation for CPUs."""
    global _started  # noqa: PLW0603 - as multiprocessing, which has one fork server per process
    if _started or not has_cpu_torch():
        return
    multiprocessing.set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()
    _started = True


def started() -> bool:
    """Whether there is a fork server."""
    return _started


class PreloadedProcess(context.ForkServerProcess):
    """A process from the fork server, with the environment of its creator at its start.

    The fork server has that of its own start: vLLM has set variables since.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Arguments are unpickled before the state: the environment is there when vLLM's objects are made.
        return _with_environment, (type(self), dict(os.environ)), self.__dict__


def _with_environment(cls: type[PreloadedProcess], environment: dict[str, str]) -> PreloadedProcess:
    os.environ.clear()
    os.environ.update(environment)
    return cls.__new__(cls)


@contextmanager
def engine_from_fork_server() -> Iterator[None]:
    """Within this context vLLM's ``get_context("spawn").Process`` comes from the fork server.

    vLLM (0.32) knows the start methods ``fork`` and ``spawn`` only. The context object is Python's and this
    process's; workers that an engine starts are spawned.
    """
    spawn: Any = multiprocessing.get_context("spawn")
    spawn.Process = PreloadedProcess
    try:
        yield
    finally:
        del spawn.Process
