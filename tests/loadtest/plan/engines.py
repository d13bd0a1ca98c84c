# SPDX-License-Identifier: Apache-2.0
"""Small engines in simulated time: the real scheduler on a pool of a few hundred tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.plan.fleet import serve_jobs
from loadtest.plan.replica import Job, Replica
from loadtest.plan.scheduling import EngineSettings
from loadtest.plan.work import Work


class Metronome:
    """Every step takes a second, whatever it computes; keeps what it was asked."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def seconds(self, work: Work) -> float:
        self.works.append(work)
        return 1.0


def settings(
    *, ours: bool, blocks: int = 65, pipelined: bool = False, **h2o: Any
) -> EngineSettings:
    return EngineSettings(
        ours=ours,
        num_blocks=blocks,
        block_size=16,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        pipelined=pipelined,
        h2o={"kv_min_tokens": 32, **h2o} if ours else {},
    )


def served(
    engine: EngineSettings, jobs: Sequence[Job], time: Any = None
) -> tuple[Replica, Sequence[Job]]:
    replica = Replica(engine, time or Metronome())
    serve_jobs(replica, jobs)
    return replica, jobs


def crowd(
    count: int, fields: dict[str, Any] | None = None, prompt: int = 200, output: int = 60
) -> list[Job]:
    """So many requests, one every other second."""
    return [Job(number, 2.0 * number, prompt, output, fields or {}) for number in range(count)]
