# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's server and end it cleanly, also when the signal comes while it starts.

Runs in the process that the user starts, which is the API server unless there are several. With one it calls
the public functions of vLLM's ``run_server`` with another signal handler: vLLM's raises ``KeyboardInterrupt``
during the start, which its ``zmq_socket_ctx`` swallows, so that the server starts in spite of the signal.
"""

import argparse
import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn, cast

import uvloop
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.api_server.entry import (
    build_and_serve,
    build_async_engine_client,
)
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.logger import init_logger
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.system_utils import decorate_logs

from h2o_vllm.server.greeting import SEVERAL, greet

logger = init_logger(f"vllm.{__name__}")

GRACE_SECONDS = 10
"""How long a stopping server waits for clients to read. uvicorn's default is for ever: one client that does
not read keeps the server from ending on SIGTERM, or when its engine dies."""

NEVER_SECONDS = 10**9
"""In 30 years."""


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code.

    Raises:
        Exception: whatever ended the start of the server.
    """
    try:
        if _has_one_api_server(args):
            _run_one(args)
        else:
            vars(args)[SEVERAL] = _address(args)
            ServeSubcommand.cmd(args)
    except SystemExit as stopped:
        # From ``_stop``, or from vLLM's command with several API servers.
        return int(stopped.code or 0)
    return 0


def leave(code: int) -> NoReturn:
    """End this process after its exit handlers, without tearing down the interpreter.

    The teardown lets Triton's bindings print a screenful about leaked references.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - CPython's own way; there is no public one
    _wait_for_children()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait_for_children() -> None:
    """At most for :data:`GRACE_SECONDS`: no process of the group should outlive the command."""
    deadline, tracker = time.monotonic() + GRACE_SECONDS, None
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if not ended and tracker is None:
                # Python's resource tracker ends when its pipe has no writer.
                tracker = cast("int", resource_tracker.getfd())
                os.close(tracker)
            elif not ended:
                time.sleep(0.01)


def _has_one_api_server(args: argparse.Namespace) -> bool:
    """Data-parallel, headless and several servers go through vLLM's own command."""
    return (
        not args.headless
        and args.api_server_count in (None, 1)
        and args.data_parallel_size == 1
        and args.data_parallel_rank is None
        and args.data_parallel_start_rank is None
        and not args.data_parallel_multi_port_external_lb
    )


def _address(args: argparse.Namespace) -> str:
    """As vLLM's ``setup_server`` (0.32) has it."""
    if args.uds:
        return f"unix:{args.uds}"
    scheme = "https" if args.ssl_keyfile and args.ssl_certfile else "http"
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"{scheme}://{host}:{args.port}"


def _run_one(args: argparse.Namespace) -> None:
    # Once the server is up, vLLM replaces both handlers by its own, which end it in order.
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    decorate_logs("APIServer", skip_if_decorated=True)
    listen_address, sock = setup_server(args, reuse_port=False)
    args.api_server_count = None
    uvloop.run(_serve(listen_address, sock, args))


async def _serve(listen_address: str, sock: socket.socket, args: argparse.Namespace) -> None:
    """As vLLM's ``run_server_worker``; says when the server is up."""
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)

    async def serving() -> None:
        greet(args, listen_address)

    logger.info("h2o: waiting for the engine, which loads the model")
    async with build_async_engine_client(args) as client:
        ended = await build_and_serve(
            client,
            listen_address,
            sock,
            args,
            timeout_graceful_shutdown=GRACE_SECONDS,
            # uvicorn calls it once it serves, then every so many seconds.
            callback_notify=serving,
            timeout_notify=NEVER_SECONDS,
        )
    try:
        await ended
    finally:
        sock.close()


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    del frame
    # A second signal must not interrupt the cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The conventional exit code.
    raise SystemExit(128 + signum)
