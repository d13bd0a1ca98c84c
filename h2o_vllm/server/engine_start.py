# SPDX-License-Identifier: Apache-2.0
"""Start the engine: on CPU by a fork where that comes to the same. Runs in the process the user starts.

vLLM spawns its engine on CPU (0.32): a new Python imports again what this one has imported already. It does
so to give workers their cores and a preloaded allocator by environment variables, which are read when a
process starts. Where the model runs inside the engine core nothing is bound to cores; and if all that vLLM
would have preloaded is in this process already, a fork is the same engine, seconds earlier. On GPUs vLLM
forks by itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client_from_engine_args
from vllm.entrypoints.launchers.cli_args import propagate_flash_late_interaction
from vllm.logger import init_logger
from vllm.usage.usage_lib import UsageContext

from h2o_vllm.engine.cpu.executor import runs_in_engine_core
from h2o_vllm.plugin import CPU_EXECUTOR

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.protocol import EngineClient

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

__all__ = ["engine_client", "may_fork"]

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""How vLLM starts processes. Its CPU platform sets it to ``spawn`` while a configuration is made."""


@asynccontextmanager
async def engine_client(
    args: argparse.Namespace, sock: socket.socket
) -> AsyncIterator[EngineClient]:
    """As vLLM's ``build_async_engine_client`` for one API server; the engine is up within the block.

    Args:
        sock: on which the server listens.

    Raises:
        Exception: whatever ended the start of the engine.
    """

    @dataclass
    class ForkingArgs(AsyncEngineArgs):
        """vLLM's, of whose configuration an engine is forked where it may be."""

        def create_engine_config(self, *args: Any, **kwargs: Any) -> VllmConfig:
            config = super().create_engine_config(*args, **kwargs)
            if may_fork(config):
                _Fork(sock).prepare()
            logger.info("h2o: waiting for the engine, which loads the model")
            return config

    engine_args = ForkingArgs.from_cli_args(args)
    propagate_flash_late_interaction(args, engine_args)
    async with build_async_engine_client_from_engine_args(
        engine_args, usage_context=UsageContext.OPENAI_API_SERVER
    ) as client:
        yield client


def may_fork(config: VllmConfig) -> bool:
    """Whether a forked engine is the engine that vLLM would spawn."""
    parallel = config.parallel_config
    if parallel.distributed_executor_backend != CPU_EXECUTOR:
        return False
    # What vLLM has put there for its engine: see check_and_update_config of its CPU platform.
    preloaded = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    mapped = Path("/proc/self/maps").read_text()
    return runs_in_engine_core(parallel) and all(path in mapped for path in preloaded)


class _Fork:
    """The one fork that makes the engine, and what has to be right before and after it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._threads = torch.get_num_threads()
        self._method = os.environ[METHOD]
        self._pending = True

    def prepare(self) -> None:
        """Let vLLM fork the next process. This one computes with a single thread from now on.

        OpenMP's threads do not survive a fork, and who waits for them in the child hangs: there may be none.
        """
        torch.set_num_threads(1)
        os.environ[METHOD] = "fork"
        os.register_at_fork(after_in_child=self._in_child, after_in_parent=self._restore)

    def _in_child(self) -> None:
        if self._pending:
            self._restore()
            torch.set_num_threads(self._threads)
            # Else a signal to the engine would be told to the server's event loop, and clients could still
            # connect to a server of which the engine alone is left.
            signal.set_wakeup_fd(-1)
            self._sock.close()

    def _restore(self) -> None:
        self._pending = False
        os.environ[METHOD] = self._method
