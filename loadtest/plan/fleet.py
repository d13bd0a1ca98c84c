# SPDX-License-Identifier: Apache-2.0
"""Replicas behind a router, in simulated time.

Replicas do not know each other, so of a large fleet a few are simulated, each with the arrivals that it
would see (:mod:`.traffic`). Only who is the least loaded cannot be told from one replica's traffic: there a
smaller fleet with the same traffic per replica stands for the large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.http.budgets import Mix
from loadtest.plan.replica import Job, Replica, StepTime
from loadtest.plan.scheduling import EngineSettings
from loadtest.plan.traffic import Traffic, arrivals

__all__ = ["ROUTINGS", "Load", "Served", "Server", "serve", "serve_jobs"]

ROUTINGS = ("round-robin", "random", "least-loaded")


@dataclass(frozen=True)
class Server:
    """Who serves: each replica of a fleet.

    Attributes:
        name: in tables and pictures.
        step_time: of its steps.
        mix: budgets of its requests; vLLM's own engine passes them over.
        gpus: of a replica.
    """

    name: str
    settings: EngineSettings
    step_time: StepTime
    mix: Mix
    gpus: int = 1


@dataclass(frozen=True)
class Load:
    """What a fleet is asked.

    Attributes:
        rate: requests per second of the whole fleet.
        replicas: how many it has; at most ``sample`` of them are simulated.
        requests: of each replica that is.
        cv: see :mod:`.traffic`.
        seed: of everything that is drawn.
    """

    rate: float
    replicas: int
    requests: int
    cv: float = 1.0
    routing: str = "round-robin"
    sample: int = 1
    seed: int = 0

    @property
    def simulated(self) -> int:
        """How many replicas are simulated."""
        return min(self.sample, self.replicas)


@dataclass(frozen=True)
class Served:
    """Simulated replicas, and the requests of each in the order of their arrival."""

    replicas: Sequence[Replica]
    jobs: Sequence[Sequence[Job]]


def serve(server: Server, traffic: Traffic, load: Load) -> Served:
    """Simulate until every request has been answered."""
    replicas = [Replica(server.settings, server.step_time) for _ in range(load.simulated)]
    if load.routing == "least-loaded":
        return _least_loaded(replicas, _jobs(server, traffic, load))
    streams = [_jobs(server, traffic, load, number) for number in range(load.simulated)]
    for replica, jobs in zip(replicas, streams, strict=True):
        serve_jobs(replica, jobs)
    return Served(replicas, streams)


def serve_jobs(replica: Replica, jobs: Sequence[Job]) -> None:
    """Serve jobs, which are sorted by arrival, to the end."""
    for job in jobs:
        replica.advance(job.at)
        replica.add(job)
    replica.advance(math.inf)


def _least_loaded(replicas: Sequence[Replica], jobs: Sequence[Job]) -> Served:
    """Each request to the replica with the fewest unfinished ones, the first of several."""
    served: list[list[Job]] = [[] for _ in replicas]
    for job in jobs:
        for replica in replicas:
            replica.advance(job.at)
        chosen = min(range(len(replicas)), key=lambda place: replicas[place].unfinished)
        replicas[chosen].add(job)
        served[chosen].append(job)
    for replica in replicas:
        replica.advance(math.inf)
    return Served(replicas, served)


def _jobs(server: Server, traffic: Traffic, load: Load, replica: int | None = None) -> list[Job]:
    """Of one replica; of all that are simulated, if ``None``."""
    count = load.requests if replica is not None else load.requests * load.simulated
    texts = traffic.texts(count, server.settings.max_model_len, load.seed, replica or 0)
    return [
        Job(number, at, text.prompt, text.output, _fields(server, number))
        for number, (at, text) in enumerate(zip(_times(load, replica), texts, strict=False))
    ]


def _times(load: Load, replica: int | None) -> Iterator[float]:
    if replica is None:
        rate = load.rate * load.simulated / load.replicas
        return arrivals(rate, load.cv, replicas=1, routing="round-robin", seed=load.seed)
    return arrivals(
        load.rate, load.cv, replicas=load.replicas, routing=load.routing, seed=load.seed, replica=replica
    )  # fmt: skip


def _fields(server: Server, number: int) -> dict[str, Any]:
    return dict(server.mix[number].fields) if server.settings.ours else {}
