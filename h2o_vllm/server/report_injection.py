# SPDX-License-Identifier: Apache-2.0
"""Put the ``kv_cache`` object into a response without parsing it. Imports nothing of ours.

API-server process. In a JSON body the field goes before the last brace. In an event stream it goes into the
last data event: the usage chunk if there is one, else the chunk with the finish reason; ``message_delta`` in
Anthropic's streams. All other events pass at once.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

Report = Mapping[str, Any]

SEPARATOR = b"\n\n"
ENDS = (b"data: [DONE]", b"event: message_stop")
"""What follows the last data event."""

RESPONSE_EVENTS = (b"event: response.completed", b"event: response.incomplete")
MESSAGE_DELTA = b"event: message_delta"
LAST_MARKERS = (b'"finish_reason":"', b'"choices":[]', MESSAGE_DELTA, *RESPONSE_EVENTS)
"""Only an event with one of these may be the last. In a JSON string the quotes are escaped, so an answer's
text cannot contain the first two; a false hit only delays one event."""


def into_json(body: bytes, report: Report | None) -> bytes:
    """``body`` with a ``kv_cache`` field at its end; unchanged if it is no JSON object."""
    if report is None:
        return body
    head = body.rstrip()
    if not (head.startswith(b"{") and head.endswith(b"}")):
        return body
    head = head[:-1].rstrip()
    comma = b"" if head == b"{" else b","
    return head + comma + b'"kv_cache":' + _dumps(report) + b"}"


class EventCompleter:
    """Passes on a stream of server-sent events and completes its last data event.

    Only an event that may be the last is held, until the next one or the end.

    Args:
        report: called once the stream has ended; gives the ``kv_cache`` object.
    """

    def __init__(self, report: Callable[[], Report | None]) -> None:
        self._report = report
        self._held = b""
        self._partial = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the stream; returns those that can be sent now."""
        *events, self._partial = (self._partial + chunk).split(SEPARATOR)
        return b"".join(self._pass(event + SEPARATOR) for event in events)

    def finish(self) -> bytes:
        """The stream has ended; returns what was still held."""
        rest = _into_event(self._held, self._report()) if self._held else b""
        rest += self._partial
        self._held = self._partial = b""
        return rest

    def _pass(self, event: bytes) -> bytes:
        if event.startswith(b":"):
            # A comment (keep-alive) decides nothing and must not wait.
            return event
        held, self._held = self._held, b""
        if held and event.startswith(ENDS):
            return _into_event(held, self._report()) + event
        if any(marker in event for marker in LAST_MARKERS):
            self._held = event
            return held
        return held + event


def _into_event(event: bytes, report: Report | None) -> bytes:
    start = 0 if event.startswith(b"data: ") else event.find(b"\ndata: ") + 1
    prefix, payload = event[: start + 6], event[start + 6 :]
    if report is None or not prefix.endswith(b"data: "):
        return event
    if event.startswith(RESPONSE_EVENTS):
        return prefix + _into_response(payload, report) + SEPARATOR
    return prefix + into_json(payload, report) + SEPARATOR


def _into_response(payload: bytes, report: Report) -> bytes:
    """The Responses API wraps the object that carries ``usage`` in its last event."""
    try:
        event = json.loads(payload)
        event["response"]["kv_cache"] = dict(report)
    except (ValueError, KeyError, TypeError):
        return payload.rstrip()
    return _dumps(event)


def _dumps(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
