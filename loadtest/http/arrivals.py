# SPDX-License-Identifier: Apache-2.0
"""When requests are sent, and how many users there are. Pure; imports nothing of ours.

Closed loop: a user sends its next request when the last one has been answered, so a slow server is asked
less. Open loop: requests come at random times, whatever the server does. There each user is a Poisson
process of its own; processes added up are a Poisson process again, so ``USERS x rate`` requests come per
second, ramps of users are ramps of the rate, and several Locust processes need not talk to each other.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from itertools import accumulate, pairwise

__all__ = ["Stages", "StagesError", "poisson"]

_STAGE = re.compile(r"(?P<time>\d+(?:\.\d+)?)(?P<unit>s|m|h):(?P<users>\d+)")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class StagesError(ValueError):
    """Stages that cannot be read."""


def poisson(rate: float, seed: str) -> Iterator[float]:
    """Seconds since the start at which requests are due, ``rate`` per second on average, without end."""
    source = random.Random(seed)
    return accumulate(source.expovariate(rate) for _ in itertools.count())


class Stages:
    """A number of users over time: a line through points, ``TIME:USERS,...``.

    Each stage takes ``TIME`` to get from the users of the stage before (0 at first) to its own:
    ``30s:16,2m:16,0s:32,1m:32`` goes up to 16 in half a minute, stays for two, and jumps to 32 for another.

    Raises:
        StagesError: ``text`` cannot be read.
    """

    def __init__(self, text: str) -> None:
        self._points: list[tuple[float, int]] = [(0.0, 0)]
        for entry in text.split(","):
            found = _STAGE.fullmatch(entry.strip())
            if found is None:
                raise StagesError(f"--stages: got {entry!r}, wanted TIME:USERS as in 30s:16,2m:16")
            seconds = float(found["time"]) * _SECONDS[found["unit"]]
            self._points.append((self._points[-1][0] + seconds, int(found["users"])))

    @property
    def seconds(self) -> float:
        """How long all stages take."""
        return self._points[-1][0]

    def users(self, now: float) -> int | None:
        """Users ``now`` seconds after the start, at least one; ``None`` when it is over."""
        if now >= self.seconds:
            return None
        for (begin, before), (end, after) in pairwise(self._points):
            if begin <= now < end:
                return max(1, round(before + (after - before) * (now - begin) / (end - begin)))
        raise AssertionError(f"{now} lies in no stage of {self._points}")
