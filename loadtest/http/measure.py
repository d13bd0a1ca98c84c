# SPDX-License-Identifier: Apache-2.0
"""What one streamed response was: from its bytes and the times they came. Pure.

A *token event* is a chunk of the stream that carries text. Its time is when its last byte was read. A
server may put several tokens into one event, so the gaps between events are the inter-token latency as a
client sees it, and token counts come from ``usage`` alone. Of server-sent events only ``data`` matters here;
an event that the stream does not end is dropped.
"""

import itertools
import json
import re
from typing import Any

DONE = "[DONE]"
"""Data of the event that ends a stream of the OpenAI API."""

_EVENT_END = re.compile(rb"\r?\n\r?\n")


class StreamMeter:
    """Reads one response.

    Attributes:
        times: when each token event came, in the caller's clock.
        usage, kv_cache: the objects of those names, if the server sent them.
        finish: ``finish_reason`` of the first choice.
        error: what the server said went wrong inside the stream.
        done: whether ``[DONE]`` came.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: dict[str, Any] | None = None
        self.kv_cache: dict[str, Any] | None = None
        self.finish: str | None = None
        self.error: str | None = None
        self.done = False
        self._rest = b""

    def feed(self, chunk: bytes, now: float) -> None:
        """Take the next bytes of the body, read at ``now``."""
        # Cut as bytes and decoded whole: a character that two chunks share is put together again.
        *events, self._rest = _EVENT_END.split(self._rest + chunk)
        for event in events:
            lines = [line for line in event.splitlines() if line.startswith(b"data:")]
            joined = b"\n".join(line.removeprefix(b"data:") for line in lines)
            data = joined.decode(errors="replace").strip()
            if data == DONE:
                self.done = True
            elif data:
                self._event(data, now)

    @property
    def problem(self) -> str | None:
        """Why the response does not count, or ``None`` if it is whole."""
        if self.error is not None:
            return self.error
        if not self.done:
            return "the stream ended without [DONE]"
        return None if self.times else "the stream has no text"

    @property
    def output_tokens(self) -> int:
        """From ``usage``; of a stream that broke off, the token events, which may be fewer."""
        if self.usage is not None:
            return int(self.usage.get("completion_tokens") or 0)
        return len(self.times)

    def gaps(self) -> list[float]:
        """Seconds between token events."""
        return [later - sooner for sooner, later in itertools.pairwise(self.times)]

    def _event(self, data: str, now: float) -> None:
        try:
            body = json.loads(data)
        except ValueError:
            self.error = f"not JSON: {data[:80]!r}"
            return
        if not isinstance(body, dict):
            self.error = f"not an object: {data[:80]!r}"
            return
        if body.get("error"):
            self.error = _message(body["error"])
            return
        self.usage = body.get("usage") or self.usage
        self.kv_cache = body.get("kv_cache") or self.kv_cache
        choices = body.get("choices") or []
        if any(_has_text(choice) for choice in choices):
            self.times.append(now)
        for choice in choices:
            self.finish = self.finish or choice.get("finish_reason")


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a token is in it. A chat stream opens with a role and an empty text: not a token."""
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    kinds = ("content", "reasoning", "reasoning_content", "tool_calls")
    return any(delta.get(kind) for kind in kinds)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
