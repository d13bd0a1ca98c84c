# SPDX-License-Identifier: Apache-2.0
"""The tiers, and how their tests share the cores. ``bash tests/run --help`` says what each tier is for.

A plain run takes what is marked neither ``slow`` nor ``long``, ``--full`` adds the slow, ``--long`` both.
Whoever names files or tests, or gives ``-k``, gets those whatever their tier.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

LONGEST_FIRST = (
    "tests/kernels/test_triton.py",
    "tests/engine/test_cuda.py",
    "tests/kernels/test_triton_compiles.py",
    "tests/engine/test_state_machine.py",
    "tests/engine/test_law10_inert.py",
)
"""Files that take many seconds: they come first, so that no worker waits for the other's at the end."""

BOTH_CORES = (
    "tests/kernels/cpu/",
    "tests/loadtest/http/test_locust.py",
    "tests/reliability/test_peers.py",
)
"""Besides ``e2e``: tests of several threads, of speed, of load on a schedule. Nothing may run beside them."""

EVERY = 4
"""``--reduced`` takes the first and each n-th case of a grid; of one with three dtypes that is all three."""

TIERS = ("slow", "long")
HOW = {"slow": "tests/run --full", "long": "tests/run --long", "reduced": "tests/run --full"}

left_out: dict[str, set[str]] = {tier: set() for tier in HOW}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption(
        "--fast", action="store_true", help="the fast tier also of files that are named"
    )
    group.addoption("--full", action="store_true", help="also what is marked slow")
    group.addoption("--long", action="store_true", help="also what is marked long; longer searches")
    group.addoption("--seed", type=int, default=7, help="where random searches begin (default: 7)")
    group.addoption(
        "--cores",
        choices=["shared", "alone"],
        help="only what may run beside other tests, or only what may not",
    )
    group.addoption("--reduced", action="store_true", help=f"of every grid each {EVERY}th case")


def pytest_configure(config: pytest.Config) -> None:
    if _is_worker(config):
        # Two processes with two OpenMP threads each on two cores take five to ten times as long: the threads
        # of one wait at every operation for those the other keeps from running. What tests start inherits it.
        os.environ["OMP_NUM_THREADS"] = "1"


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


# Which tests run


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether searches may take an hour."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """Where random searches begin."""
    return int(request.config.getoption("--seed"))


@pytest.fixture(scope="session")
def fast(request: pytest.FixtureRequest) -> bool:
    """Whether this is the fast tier."""
    return not _tiers(request.config)


def _tiers(config: pytest.Config) -> set[str]:
    """What runs besides the fast tier."""
    if config.option.fast:
        return set()
    if config.option.long or config.option.keyword or any(map(_names_tests, config.args)):
        return {"slow", "long"}
    return {"slow"} if config.option.full else set()


def _names_tests(argument: str) -> bool:
    return "::" in argument or Path(argument).suffix == ".py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted, cases = _tiers(config), dict[str, int]()
    kept, dropped = [], []
    for item in items:
        if config.option.cores and _is_alone(item) != (config.option.cores == "alone"):
            # Of the other part of this run: not left out.
            dropped.append(item)
            continue
        function = item.nodeid.partition("[")[0]
        cases[function] = cases.get(function, -1) + 1
        reason = next((tier for tier in TIERS if item.get_closest_marker(tier)), None)
        if reason in wanted:
            reason = None
        if config.option.reduced and cases[function] % EVERY:
            reason = "reduced"
        if reason is None:
            kept.append(item)
        else:
            dropped.append(item)
            left_out[reason].add(item.nodeid)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    # What needs the machine to itself comes last.
    items[:] = sorted(kept, key=_rank)


def _is_alone(item: pytest.Item) -> bool:
    engine = "engine" in getattr(item, "fixturenames", ())
    return engine or bool(item.get_closest_marker("e2e")) or item.nodeid.startswith(BOTH_CORES)


def _rank(item: pytest.Item) -> int:
    if _is_alone(item):
        return len(LONGEST_FIRST) + 1
    places = (at for at, file in enumerate(LONGEST_FIRST) if item.nodeid.startswith(file))
    return next(places, len(LONGEST_FIRST))


# What a run says at its end


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _is_worker(session.config):
        output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
        output["left_out"] = {tier: sorted(names) for tier, names in left_out.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for tier, names in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        left_out[tier].update(names)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    said = [f"{len(names)} {tier} ({HOW[tier]})" for tier, names in left_out.items() if names]
    if said:
        terminalreporter.write_sep("-", f"left out: {', '.join(said)}")
