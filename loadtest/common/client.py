# SPDX-License-Identifier: Apache-2.0
"""A streaming HTTP client of the standard library, safe for threads and for Locust's greenlets.

Hands out bytes as they come off the wire, so that a time can be put on each. Connections are kept and used
again, as production clients do: a new one would be part of every time to first token.
"""

import http.client
import json
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 1 << 16


class HTTPStatusError(Exception):
    """The server answered with something else than 200.

    Attributes:
        status: the status code.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body[:200].decode(errors='replace')}")
        self.status = status


class Client:
    """Requests to one server.

    Args:
        base_url: ``http://host:port``, with a path before ``/v1`` if the server has one.
        timeout: seconds that may pass between two reads.
    """

    def __init__(self, base_url: str, api_key: str = "", timeout: float = 600.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--host: got {base_url!r}, wanted http://HOST[:PORT] or https://...")
        self._https = parts.scheme == "https"
        self._address = (parts.hostname, parts.port)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._tls = ssl.create_default_context() if self._https else None
        self._idle: list[http.client.HTTPConnection] = []

    def get_json(self, path: str) -> Any:
        """The JSON at ``path``. Raises what :meth:`stream` raises."""
        return json.loads(self._whole("GET", path, None))

    def post_json(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to ``body``. Raises what :meth:`stream` raises."""
        return json.loads(self._whole("POST", path, body))

    def stream(
        self,
        path: str,
        body: dict[str, Any] | None,
        on_chunk: Callable[[bytes], None],
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        on_headers: Callable[[Mapping[str, str]], None] | None = None,
    ) -> None:
        """Send ``body`` and hand every piece of the answer to ``on_chunk`` as it comes.

        Args:
            headers: of this request, beside those of all.
            on_headers: is handed those of the answer, their names in lower case, before its pieces.

        Raises:
            HTTPStatusError: the status is not 200.
            OSError, http.client.HTTPException: the connection failed, or ended too early.
        """
        payload = None if body is None else json.dumps(body).encode()
        connection, response = self._open(method, path, payload, headers or {})
        try:
            if response.status != 200:
                raise HTTPStatusError(response.status, response.read())
            if on_headers is not None:
                on_headers({name.lower(): value for name, value in response.headers.items()})
            while chunk := response.read1(READ_BYTES):
                on_chunk(chunk)
            # Not done by read1; until it is, the connection refuses the next request.
            response.close()
        except BaseException:
            # Also where a greenlet is killed: the server must see that the client is gone.
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        pieces: list[bytes] = []
        self.stream(path, body, pieces.append, method)
        return b"".join(pieces)

    def _open(
        self, method: str, path: str, payload: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else self._connection()
            try:
                connection.request(
                    method, self._prefix + path, payload, {**self._headers, **headers}
                )
                return connection, connection.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected):
                connection.close()
                # The server may close a connection that idles; that is no failure.
                if not kept:
                    raise
            except BaseException:
                connection.close()
                raise

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address
        if self._https:
            return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=self._timeout)
