# SPDX-License-Identifier: Apache-2.0
"""When requests of an open loop are sent. Pure; imports nothing of ours.

They come at random times, whatever the server does. Each user is a Poisson process of its own; added up they
are one again, so ``USERS x rate`` requests come per second, and several Locust processes need not talk to
each other.
"""

import itertools
import random
from collections.abc import Iterator
from itertools import accumulate


def poisson(rate: float, seed: str) -> Iterator[float]:
    """Seconds since the start at which requests are due, ``rate`` per second on average, without end."""
    source = random.Random(seed)
    return accumulate(source.expovariate(rate) for _ in itertools.count())
