# SPDX-License-Identifier: Apache-2.0
"""Start the engine, from the fork server where there is one. Runs in the process the user starts.

vLLM spawns its engine (0.32), also to give it libraries that are preloaded by an environment variable.
An engine from the fork server (:mod:`.fork_server`) has what that server was started with: it is the same
engine if all that vLLM would have preloaded is there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client_from_engine_args
from vllm.entrypoints.launchers.cli_args import propagate_flash_late_interaction
from vllm.logger import init_logger
from vllm.usage.usage_lib import UsageContext

from h2o_vllm.server import fork_server
from h2o_vllm.server.still import StartWatch, StoodStillError

# Below "vllm", so that vLLM's logging configuration applies.
logger = init_logger(f"vllm.{__name__}")

__all__ = ["engine_client"]


@asynccontextmanager
async def engine_client(args: argparse.Namespace, watch: StartWatch) -> AsyncIterator[EngineClient]:
    """As vLLM's ``build_async_engine_client`` for one API server; the engine is up within the block.

    An engine that stood still while it started is started once more, by a spawn.

    Args:
        watch: ends an engine that stands still.

    Raises:
        StoodStillError: the second engine stood still as well.
        Exception: whatever else ended the start of the engine.
    """
    async with AsyncExitStack() as up:
        try:
            client = await up.enter_async_context(_built(args, watch, fork_server.started()))
        except Exception:
            if watch.ended is None:
                raise
            logger.error("h2o: %s; starting it once more", watch.ended)  # noqa: TRY400 - says it all
            client = await up.enter_async_context(_again(args, watch))
        yield client


@asynccontextmanager
async def _again(args: argparse.Namespace, watch: StartWatch) -> AsyncIterator[EngineClient]:
    try:
        async with _built(args, watch, preloaded=False) as client:
            yield client
    except Exception as error:
        if watch.ended is None:
            raise
        raise StoodStillError(f"{watch.ended}, for the second time") from error


@asynccontextmanager
async def _built(
    args: argparse.Namespace, watch: StartWatch, preloaded: bool
) -> AsyncIterator[EngineClient]:
    with ExitStack() as start:

        class StartingArgs(AsyncEngineArgs):
            """vLLM's; it is told which way the engine starts, once there is a configuration."""

            def create_engine_config(self, *args: Any, **kwargs: Any) -> VllmConfig:
                config = super().create_engine_config(*args, **kwargs)
                if preloaded and _is_preloaded():
                    start.enter_context(fork_server.engine_from_fork_server())
                logger.info("h2o: waiting for the engine, which loads the model")
                watch.engine_starts()
                return config

        engine_args = StartingArgs.from_cli_args(args)
        propagate_flash_late_interaction(args, engine_args)
        async with build_async_engine_client_from_engine_args(
            engine_args, usage_context=UsageContext.OPENAI_API_SERVER
        ) as client:
            start.close()
            watch.engine_is_up()
            yield client


def _is_preloaded() -> bool:
    """Whether the libraries are here that vLLM has put into ``LD_PRELOAD`` for its engine.

    See ``check_and_update_config`` of its CPU platform. The fork server has imported what this process has.
    """
    preloaded = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    mapped = Path("/proc/self/maps").read_text()
    return all(path in mapped for path in preloaded)
