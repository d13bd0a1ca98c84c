# SPDX-License-Identifier: Apache-2.0
"""Clients of a live server that stream, that stop reading, that vanish, and that send nonsense."""

import contextlib
import http.client
import json
import random
import socket
import struct
import threading
from types import TracebackType
from typing import Any, Self

import httpx

from tests.server.grammar import Nonsense
from tests.server.live_server import KEY, MODEL, LiveServer


def body(tokens: int = 200, **options: Any) -> dict[str, Any]:
    """A streamed completion that ends by length."""
    prompt = [1000 + 7 * i for i in range(tokens)]
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": 1500, "temperature": 0, "ignore_eos": True,
        "stream": True, **options,
    }  # fmt: skip


class Stream(threading.Thread):
    """Reads one stream to its end.

    Attributes:
        events: the data of its events so far.
        started: set with the first of them.
        broken: how the transport ended it, if it did.
    """

    def __init__(self, server: LiveServer, **options: Any) -> None:
        super().__init__(daemon=True)
        self._url = f"{server.url}/v1/completions"
        self._body = body(**options)
        self.events: list[str] = []
        self.started = threading.Event()
        self.broken: str | None = None
        self.start()

    def run(self) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, headers=headers, timeout=300
            ) as r:
                for line in r.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.started.set()
        except httpx.HTTPError as error:
            self.broken = type(error).__name__

    @property
    def failed(self) -> bool:
        """Whether its client can see that it did not end as it should."""
        return self.broken is not None or any('"error"' in event for event in self.events)

    @property
    def report(self) -> Any:
        """The ``kv_cache`` object of a stream that ended well."""
        assert self.events[-1] == "[DONE]"
        return json.loads(self.events[-2])["kv_cache"]


class SilentClient:
    """Sends a request and reads nothing of the answer, through the smallest of buffers."""

    def __init__(self, server: LiveServer, path: str = "/v1/completions", **options: Any) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.connect(("127.0.0.1", server.port))
        content = json.dumps(body(**options)).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + content)

    def vanish(self) -> None:
        """Close so that the server gets a reset, as from a machine that was switched off."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()


def under_load(server: LiveServer, **options: Any) -> list[Stream]:
    """Streams with several budgets, each of which has begun."""
    asked = [{}, {"kv_budget": 0.2}, {"kv_budget": 0.5}, {"kv_budget_tokens": 140}]
    streams = [Stream(server, **fields, **options) for fields in asked]
    for stream in streams:
        assert stream.started.wait(300)
    return streams


def send(server: LiveServer, request: Nonsense) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": request.content_type}
    try:
        connection.request(request.method, request.path, request.content, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def half_closed(server: LiveServer, request: Nonsense, chance: random.Random) -> None:
    """Send a part of the request, close one direction or both, and wait for no answer in particular."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(request.content) + 1}\r\n\r\n"
    ).encode()
    whole = head + request.content
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=20) as connection, contextlib.suppress(OSError):
        connection.sendall(whole[: chance.randrange(1, len(whole) + 1)])
        connection.shutdown(chance.choice((socket.SHUT_WR, socket.SHUT_RDWR)))
        connection.recv(1000)
