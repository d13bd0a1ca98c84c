# SPDX-License-Identifier: Apache-2.0
"""Server-sent events from bytes that may be cut anywhere. Pure; imports nothing of ours.

Follows the WHATWG HTML standard, section 9.2.6 "Interpreting an event stream": lines end with CRLF, LF or
CR, several ``data`` lines of one event are joined by LF, a line that begins with a colon is a comment
(servers send them as keep-alives), an empty line ends the event, and an event that the stream does not
end is dropped. Lines are cut as bytes and decoded whole, so a character cut in two is put together again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DONE", "Event", "Parser"]

DONE = "[DONE]"
"""Data of the event that ends a stream of the OpenAI API; not part of the standard."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        data: its ``data`` lines, joined by LF.
        name: its ``event`` field.
    """

    data: str
    name: str = "message"


class Parser:
    """Takes a stream chunk by chunk."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._first_line = True
        self._data: list[str] = []
        self._name = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that ``chunk`` completes, in order."""
        if self._after_cr and chunk:
            # This CR has ended a line already; an LF behind it is its second half.
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        events = []
        for line in lines:
            if self._first_line:
                self._first_line = False
                line = line.removeprefix(_BOM)  # noqa: PLW2901 - the same line
            if line:
                self._field(line)
            elif (event := self._dispatch()) is not None:
                events.append(event)
        return events

    def _field(self, line: bytes) -> None:
        if line.startswith(b":"):
            return
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", errors="replace")
        if name == b"data":
            self._data.append(text)
        elif name == b"event":
            self._name = text

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._name
        self._data, self._name = [], ""
        return Event("\n".join(data), name or "message") if data else None
