# SPDX-License-Identifier: Apache-2.0
"""Fleets: who gets a request, what figures are of, and the two searches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.http.budgets import Mix
from loadtest.plan.figures import Figures, dollars_per_million, figures_of
from loadtest.plan.fleet import Load, Served, Server, serve
from loadtest.plan.replica import Job, Step
from loadtest.plan.search import Objective, carried_rate, needed_replicas
from loadtest.plan.traffic import load_traffic
from tests.loadtest.plan.engines import Metronome, settings

TRAFFIC = load_traffic("100+10")


def server(mix: str = "none") -> Server:
    return Server(mix, settings(ours=mix != "none"), Metronome(), Mix(mix))


@pytest.mark.parametrize("routing", ["round-robin", "random", "least-loaded"])
def test_every_request_is_served_once(routing: str) -> None:
    load = Load(rate=1.0, replicas=3, requests=20, routing=routing, sample=2)
    served = serve(server(), TRAFFIC, load)
    jobs = [job for jobs in served.jobs for job in jobs]
    assert len(served.replicas) == 2 and len(jobs) == 40
    assert all(job.ended for job in jobs)
    # Two of three replicas see two thirds of the traffic.
    assert 40 / max(job.at for job in jobs) == pytest.approx(2 / 3, rel=0.5)


def test_the_same_seed_is_the_same_run() -> None:
    runs = [serve(server(), TRAFFIC, Load(1.0, 2, 20, sample=2, seed=seed)) for seed in (1, 1, 2)]
    ends = [[job.end for jobs in run.jobs for job in jobs] for run in runs]
    assert ends[0] == ends[1] != ends[2]


def test_the_least_loaded_is_asked() -> None:
    served = serve(server(), TRAFFIC, Load(4.0, 4, 15, routing="least-loaded", sample=4))
    counts = [len(jobs) for jobs in served.jobs]
    assert sum(counts) == 60 and max(counts) - min(counts) <= 6
    # Where nothing waits, the first of those that are free.
    idle = serve(server(), TRAFFIC, Load(0.001, 4, 3, routing="least-loaded", sample=4))
    assert [len(jobs) for jobs in idle.jobs] == [12, 0, 0, 0]


def test_budgets_are_dealt_in_turn() -> None:
    jobs = serve(server("1.0:1,0.2:1"), TRAFFIC, Load(1.0, 1, 6)).jobs[0]
    assert sorted(job.fields["kv_budget"] for job in jobs) == [0.2] * 3 + [1.0] * 3
    assert not any(job.fields for job in serve(server(), TRAFFIC, Load(1.0, 1, 6)).jobs[0])


def job(at: float, first: float, end: float, tokens: int = 11, **more: Any) -> Job:
    return Job(0, at, 100, tokens, first=first, end=end, **more)


def test_figures_by_hand() -> None:
    steps = [
        Step(2.0, 2.0, 1, 5, 0.2),
        Step(6.0, 2.0, 2, 4, 0.5),
        Step(9.0, 1.0, 4, 6, 1.0),
        Step(20.0, 1.0, 9, 9, 1.0),
    ]
    jobs = [
        job(0, 1, 11),
        job(4, 6, 16),
        job(5, 5.5, 10.5, preemptions=1),
        job(10, 13, 23, lossless=False),
    ]
    replica: Any = SimpleNamespace(steps=steps, now=20.0)
    found = figures_of(Served([replica], [jobs]), warm_up=0.25)
    # From the second arrival to the last: seconds 4 to 10, in which two steps ended.
    assert found.requests == 3
    assert found.tok_per_s == pytest.approx(10 / 6)
    assert found.asked_tok_per_s == pytest.approx(33 / 6)
    assert found.running == pytest.approx((2 * 2 + 4 * 1) / 6)
    assert found.usage == pytest.approx((0.5 * 2 + 1.0 * 1) / 6)
    assert found.first_token_s["p50"] == 2.0
    assert found.per_token_s["p50"] == 1.0
    assert found.preemptions == pytest.approx(1000 / 3)
    assert found.lossless == pytest.approx(2 / 3)
    assert figures_of(Served([replica], [jobs]), warm_up=0).tok_per_s == pytest.approx(24 / 20)


def test_a_million_tokens_cost() -> None:
    # 8 GPUs at 3 $: 24 $ an hour, in which they generate 36 million.
    assert dollars_per_million(8, 3.0, 10_000) == pytest.approx(24 / 36)
    assert math.isinf(dollars_per_million(8, 3.0, 0))


def figures(first_token: float, kept: float = 1.0) -> Figures:
    shares = {"p50": first_token / 2, "p90": first_token, "p99": 2 * first_token}
    return Figures(100, 1.0, 100 * kept, 100.0, shares, shares, 0.5, 0.0, 1.0)


class Fleet:
    """Its first token takes as many seconds as a replica gets requests per second."""

    def __init__(self, base: float = 0.0) -> None:
        self.base = base
        self.asked: list[tuple[float, int]] = []

    def __call__(self, rate: float, replicas: int) -> Figures:
        self.asked.append((rate, replicas))
        return figures(self.base + rate / replicas)


@pytest.mark.parametrize("guess", [0.5, 18.0, 400.0])
def test_the_highest_rate_is_found(guess: float) -> None:
    fleet = Fleet()
    found = carried_rate(fleet, Objective(3.0, 90), replicas=6, guess=guess)
    assert found is not None and 18 / 1.05 <= found.rate <= 18
    assert found.figures.first_token_s["p90"] <= 3.0 and len(fleet.asked) < 16
    half = carried_rate(Fleet(), Objective(3.0, 99), replicas=6, guess=guess)
    assert half is not None and 9 / 1.05 <= half.rate <= 9


@pytest.mark.parametrize("guess", [1, 5, 6, 7, 300])
def test_the_smallest_fleet_is_found(guess: int) -> None:
    fleet = Fleet()
    found = needed_replicas(fleet, Objective(3.0, 90), rate=18.0, guess=guess)
    assert found is not None and found.replicas == 6
    assert len(fleet.asked) == len(set(fleet.asked)) < 16


def test_an_objective_that_nobody_meets() -> None:
    late = Fleet(base=5.0)
    assert carried_rate(late, Objective(3.0, 90), 6, 18.0) is None
    assert needed_replicas(late, Objective(3.0, 90), 18.0, 6, most=500) is None
    assert late.asked[-1] == (18.0, 500)


def test_an_engine_that_falls_behind_does_not_meet_it() -> None:
    assert Objective(3.0, 90).met(figures(1.0, kept=0.95))
    assert not Objective(3.0, 90).met(figures(1.0, kept=0.8))
