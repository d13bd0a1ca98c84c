# SPDX-License-Identifier: Apache-2.0
"""Time that tests control: an event loop that waits for nothing, and a server that lives in it.

What a server does at 150 ms is done at 0.15 exactly, on any machine and at once.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import threading
from collections.abc import Callable, Mapping
from typing import Any

from loadtest.common.client import HTTPStatusError


class InstantSelector(selectors.DefaultSelector):
    """Adds up the time it was told to wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everybody waits, and nothing will happen"
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on only when all of its tasks sleep."""

    def __init__(self) -> None:
        self._instant = InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now


class Call:
    """One request to an ASGI application, and when what came back."""

    def __init__(self, path: str, body: Any, on_chunk: Callable[[bytes], None]) -> None:
        self.path = path
        self.content = json.dumps(body).encode() if body is not None else b""
        self.method = "POST" if body is not None else "GET"
        self.on_chunk = on_chunk
        self.status = 0
        self.headers: dict[str, str] = {}
        self.ended = 0.0

    async def run(self, app: Any) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": self.method, "path": self.path, "raw_path": self.path.encode(), "root_path": "",
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        parts = [{"type": "http.request", "body": self.content, "more_body": False}]
        await app(scope, lambda: self._receive(parts), self._send)
        self.ended = asyncio.get_running_loop().time()

    async def _receive(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        # No client disconnects.
        return parts.pop() if parts else await asyncio.Future()

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message["body"]:
            self.on_chunk(message["body"])


class VirtualServer:
    """Takes the place of a ``Client``: ``at_once`` threads send, and are answered in virtual time.

    The last one to send lets the loop run. Each thread has the time of the end of its own answer.
    """

    def __init__(self, app: Any, at_once: int = 1) -> None:
        self.loop = VirtualLoop()
        self._app = app
        self.headers: list[dict[str, str]] = []
        """Of each request that was streamed."""
        self._calls: list[Call] = []
        self._barrier = threading.Barrier(at_once, action=self._run)
        self._mine = threading.local()

    def clock(self) -> float:
        return getattr(self._mine, "ended", self.loop.time())

    def get_json(self, path: str) -> Any:
        return self._whole(Call(path, None, lambda chunk: None))

    def post_json(self, path: str, body: dict[str, Any]) -> Any:
        return self._whole(Call(path, body, lambda chunk: None))

    def stream(
        self,
        path: str,
        body: Any,
        on_chunk: Callable[[bytes], None],
        headers: Mapping[str, str] | None = None,
        on_headers: Callable[[Mapping[str, str]], None] = lambda headers: None,
    ) -> None:
        self.headers.append(dict(headers or {}))
        call = Call(path, body, on_chunk)
        self._calls.append(call)
        self._barrier.wait(60)
        self._mine.ended = call.ended
        if call.status != 200:
            raise HTTPStatusError(call.status, b"")
        on_headers(call.headers)

    def close(self) -> None:
        self.loop.close()

    def _run(self) -> None:
        calls, self._calls = self._calls, []

        async def all_of_them() -> None:
            await asyncio.gather(*(call.run(self._app) for call in calls))

        self.loop.run_until_complete(all_of_them())

    def _whole(self, call: Call) -> Any:
        chunks: list[bytes] = []
        call.on_chunk = chunks.append
        self.loop.run_until_complete(call.run(self._app))
        if call.status != 200:
            raise HTTPStatusError(call.status, b"".join(chunks))
        return json.loads(b"".join(chunks))
