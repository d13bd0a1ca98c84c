# SPDX-License-Identifier: Apache-2.0
"""The application of ``h2o-serve`` for other ASGI servers, such as Ray Serve.

::

    app = H2OApplication("--model", "DIR", "--kv-budget", "0.2")  # uvicorn module:app

Runs in the process of that server, which brings the listener, signals and TLS. The engine is a process of its
own, started with the application's lifespan and ended with it.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from h2o_vllm import dependencies
from h2o_vllm.errors import ConfigError

if TYPE_CHECKING:
    from h2o_vllm.server.middleware import Receive, Scope, Send

logger = logging.getLogger(__name__)


class H2OApplication:
    """An ASGI application with an engine behind it. Cheap to make and to pickle until it starts.

    A start that fails says why in ``lifespan.startup.failed``. The server should look at
    :attr:`healthy`: with a dead engine it answers with errors until it is started anew.

    Args:
        options: of ``h2o-serve``; what concerns its listener (``--host``, ``--ssl-keyfile``) has no effect.
    """

    def __init__(self, *options: str) -> None:
        self.options = options
        self._app: Any = None
        self._client: Any = None

    @property
    def healthy(self) -> bool:
        """Whether it is up, and its engine alive."""
        return self._client is not None and not self._client.errored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif self._app is None:
            raise RuntimeError("H2OApplication: requests come after the lifespan's startup")
        else:
            await self._app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            try:
                app = await self._start(stack)
            except (Exception, SystemExit) as error:
                # Ours say what to change; the place of others may have to be looked for.
                said = None if isinstance(error, ConfigError) else error
                logger.log(
                    logging.ERROR, "h2o: the application does not start: %s", error, exc_info=said
                )
                await receive()
                message = f"{type(error).__name__}: {error}"
                await send({"type": "lifespan.startup.failed", "message": message})
                return
            self._app = app
            try:
                await app(scope, receive, send)
            finally:
                self._app = self._client = None

    async def _start(self, stack: AsyncExitStack) -> Any:
        """The application of vLLM with our middleware, its engine up; ``stack`` ends it."""
        # Imported here: vLLM need not be loaded until it starts.
        with dependencies.imports():
            from vllm.entrypoints.launchers.api_server.app_state import init_app_state
            from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
            from vllm.entrypoints.launchers.app import build_app
            from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
            from vllm.logger import configure_logging_from_args

            from h2o_vllm.server.cli import config_of, parse
            from h2o_vllm.server.serve import prepare

            args, parser = parse(self.options)
        config = config_of(args)
        if args.headless or args.api_server_count not in (None, 1):
            raise ConfigError("--headless, --api-server-count: an application has one front end")
        # From here on this process is changed: its environment, and how it logs.
        cli_env_setup()
        configure_logging_from_args(args)
        prepare(args, parser, config)
        self._client = client = await stack.enter_async_context(build_async_engine_client(args))
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        await init_app_state(client, app.state, args, tasks)
        # vLLM tells its own server to end when its engine has died; ours is told by ``healthy``.
        app.state.server = SimpleNamespace(should_exit=False)
        return app
