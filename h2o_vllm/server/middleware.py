# SPDX-License-Identifier: Apache-2.0
"""The ASGI layer around vLLM's application; runs in every API-server process.

vLLM adds it through ``--middleware``, which makes it the outermost layer, in front of vLLM's authentication.
It checks the API key where vLLM does not. The body is read only when the application reads it, so nothing of
an unauthenticated request is read. A refusal replaces the application's answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi.responses import JSONResponse

import h2o_vllm
from h2o_vllm.blocks.counts.schedule import OtherGroup
from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_fields import ROLE_WORDS
from h2o_vllm.engine import start_log
from h2o_vllm.engine.support.check import config_of
from h2o_vllm.errors import ConfigError
from h2o_vllm.metrics import stat_logger
from h2o_vllm.server import admission, config_route, engine_death, playground
from h2o_vllm.server.access import Access
from h2o_vllm.server.admission import HTTPRequest
from h2o_vllm.server.greeting import greet_once
from h2o_vllm.server.protocol import RefusalError, admit, error_body
from h2o_vllm.server.report_injection import EventCompleter, into_json
from h2o_vllm.server.routes import Rule, route_path, rule_for
from h2o_vllm.server.system_prefix import Render, system_prefixes, vllm_render

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

SIGNATURE = (b"x-h2o-vllm", h2o_vllm.__version__.encode("ascii"))
"""A header of every response: the version of the replica that answered."""


@dataclass(frozen=True)
class Bound:
    """What belongs to one application."""

    config: H2OConfig
    access: Access
    render: Render
    count_refusal: Callable[[str], None]


class KVCacheMiddleware:
    """Checks the key and the budget fields, and adds ``kv_cache`` to responses; passes all else unchanged.

    Args:
        app: the next ASGI application; vLLM constructs middleware with nothing else.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._bound: Bound | None = None
        self._other_groups: tuple[OtherGroup, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
            return
        bound = self._bind(scope["app"])
        send = _with_version(send)
        if bound.access.refuses(scope):
            challenge = bound.access.challenge(scope)
            await JSONResponse({"error": "Unauthorized"}, 401, challenge)(scope, receive, send)
            return
        # A websocket has no method, and no budget fields.
        rule = rule_for(scope.get("method", ""), route_path(scope))
        if rule is None:
            await self._app(scope, receive, send)
            return
        with admission.http_request() as request:
            await HTTPExchange(bound, rule, request, scope, receive, send).run(self._app)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Bind before the first request, so that a failure ends the start instead of a request."""
        try:
            state = scope["app"].state
            client = state.engine_client
            self._other_groups = await admission.other_groups(client, state.vllm_config)
            self._bind(scope["app"])
            engine_death.watch(client)
        except (ConfigError, TypeError, AttributeError) as error:
            refusal = f"h2o_vllm cannot serve this application: {error}"
            engine_death.ending.refusal = refusal
            await receive()
            await send({"type": "lifespan.startup.failed", "message": refusal})
            return
        start_log.end()

        async def receive_and_watch() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                engine_death.server_stops(client)
            return message

        async def send_and_greet(message: Message) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                # uvicorn listens right after this message.
                args = getattr(scope["app"].state, "args", None)
                asyncio.get_running_loop().call_later(1, greet_once, args)

        await self._app(scope, receive_and_watch, send_and_greet)

    def _bind(self, application: Any) -> Bound:
        """Read the engine's configuration, wrap the engine client, add our routes; once."""
        if self._bound is not None:
            return self._bound
        state = application.state
        client, engine = state.engine_client, state.vllm_config
        if CONFIG_KEY not in engine.additional_config:
            raise ConfigError(f"additional_config has no {CONFIG_KEY!r} key")
        config = config_of(engine)
        if self._other_groups and not config.no_settling_reason:
            why = "its model has windows, chunks or states beside full attention"
            config = replace(config, no_settling_reason=why)
        count_refusal, access = stat_logger.install(client, engine), Access(application)
        admission.install(client, engine, config, count_refusal, self._other_groups)
        config_route.attach(application, config, documents_key=bool(access.keys))
        if getattr(getattr(state, "args", None), "kv_playground", False):
            playground.attach(application)
        render = vllm_render(getattr(state, "serving_render", None))
        self._bound = Bound(config, access, render, count_refusal)
        return self._bound


@dataclass
class HTTPExchange:
    """One HTTP request and its response."""

    server: Bound
    rule: Rule
    request: HTTPRequest
    scope: Scope
    inner_receive: Receive
    inner_send: Send
    _body_read: bool = False
    _refusal: RefusalError | None = None
    _answered: bool = False
    _events: EventCompleter | None = None
    _held_start: Message | None = None
    _body: list[bytes] = field(default_factory=list)

    async def run(self, app: App) -> None:
        """Let ``app`` answer, or send the refusal."""
        try:
            await app(self.scope, self._receive, self._send)
        except Exception:
            if self._refusal is None:
                raise
        if self._refusal is not None:
            await self._refuse([])

    async def _receive(self) -> Message:
        """ASGI ``receive``: the whole body, checked and rewritten; then all other messages."""
        if self._body_read:
            return await self.inner_receive()
        chunks: list[bytes] = []
        while True:
            message = await self.inner_receive()
            if message["type"] != "http.request":
                return message
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        self._body_read = True
        try:
            body = await self._admit(b"".join(chunks))
        except RefusalError as refusal:
            self._refusal = refusal
            self.server.count_refusal(refusal.reason)
            raise
        return {"type": "http.request", "body": body, "more_body": False}

    async def _admit(self, body: bytes) -> bytes:
        """Check ``body`` and keep its budget for the engine calls; returns the body for vLLM.

        Raises:
            RefusalError: a field cannot be served.
        """
        path, query = route_path(self.scope), self.scope.get("query_string", b"")
        self.request.admitted = admitted = admit(body, path, self.rule, self.server.config, query)
        if admitted.request is None or admitted.budget is None:
            return admitted.body
        word = admitted.budget.protect
        if word in ROLE_WORDS and admitted.budget.evicts and admitted.reported:
            render = self.server.render
            system = await system_prefixes(render, path, admitted.request, str(word))
            self.request.system = system
            missing = next((one for one in system if one.is_missing), None)
            if admitted.names_protect and missing is not None:
                # Refused here: a stream of /v1/responses begins before vLLM calls the engine.
                raise RefusalError(str(missing.error(str(word))), "kv_protect", "value")
        return admitted.body

    async def _send(self, message: Message) -> None:
        """ASGI ``send``."""
        kind = message["type"]
        if self._refusal is not None:
            if kind == "http.response.start":
                await self._refuse(list(message.get("headers", [])))
        elif kind == "http.response.start":
            await self._send_start(message)
        elif kind == "http.response.body":
            await self._send_body(message)
        else:
            await self.inner_send(message)

    async def _refuse(self, headers: Headers) -> None:
        """Send the error, with the headers (CORS, request id) of the response it replaces."""
        if self._answered or self._refusal is None:
            return
        self._answered = True
        body = error_body(self._refusal, route_path(self.scope))
        kept = [(k, v) for k, v in headers if not k.lower().startswith(b"content-")]
        kept += [(b"content-type", b"application/json"), (b"content-length", _length(body))]
        await self.inner_send({"type": "http.response.start", "status": 400, "headers": kept})
        await self.inner_send({"type": "http.response.body", "body": body})

    async def _send_start(self, message: Message) -> None:
        self._answered = True
        headers = {k.lower(): v for k, v in message.get("headers", [])}
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip()
        admitted = self.request.admitted
        reported = admitted is not None and admitted.reported and message["status"] == 200
        reported = reported and b"content-encoding" not in headers
        if reported and media_type == b"application/json":
            self._held_start = message
            return
        if reported and media_type == b"text/event-stream":
            self._events = EventCompleter(self.request.reports.kv_cache)
        await self.inner_send(message)

    async def _send_body(self, message: Message) -> None:
        if self._held_start is not None:
            await self._send_json(self._held_start, message)
        elif self._events is not None:
            await self._send_events(self._events, message)
        else:
            await self.inner_send(message)

    async def _send_json(self, start: Message, message: Message) -> None:
        self._body.append(bytes(message.get("body", b"")))
        if message.get("more_body", False):
            return
        self._held_start = None
        body = into_json(b"".join(self._body), self.request.reports.kv_cache())
        headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", _length(body)))
        await self.inner_send({**start, "headers": headers})
        await self.inner_send({**message, "body": body})

    async def _send_events(self, events: EventCompleter, message: Message) -> None:
        more = message.get("more_body", False)
        out = events.feed(bytes(message.get("body", b"")))
        if not more:
            out += events.finish()
        if out or not more:
            await self.inner_send({**message, "body": out})


def _with_version(send: Send) -> Send:
    async def send_with_version(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), SIGNATURE]}
        await send(message)

    return send_with_version


def _length(body: bytes) -> bytes:
    return str(len(body)).encode("ascii")
