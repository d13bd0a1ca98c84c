# SPDX-License-Identifier: Apache-2.0
"""The time of a GPU that is not there, for :mod:`tests.engine.cuda.fake_gpu`."""

from __future__ import annotations


class Stream:
    """The GPU's, which is behind the host: it has reached nothing before somebody waits for it.

    Attributes:
        clock: seconds of the work that is queued. reached: how far the GPU has come.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.reached = -1.0

    def event(self, *, enable_timing: bool = False) -> Event:
        return Event(self, timed=enable_timing)


class Event:
    """``torch.cuda.Event``; to wait for one that has not come is an error."""

    def __init__(self, stream: Stream, *, timed: bool) -> None:
        self._stream, self._timed = stream, timed

    def record(self) -> None:
        self._at = self._stream.clock

    def query(self) -> bool:
        return self._at <= self._stream.reached

    def synchronize(self) -> None:
        assert self.query(), "waited for an event to come"

    def elapsed_time(self, end: Event) -> float:
        assert self._timed and end._timed
        assert self.query() and end.query(), "asked for the time of an event to come"
        return 1000 * (end._at - self._at)
