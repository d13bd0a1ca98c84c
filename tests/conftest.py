# SPDX-License-Identifier: Apache-2.0
"""The tiers, and how their tests share the cores. ``bash tests/run --help`` says what each tier is for.

A plain run takes what is marked neither ``slow`` nor ``long``, ``--full`` adds the slow, ``--long`` both.
Whoever names files or tests, or gives ``-k``, gets those whatever their tier.
"""

import gc
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

# Before torch is imported, here and in what tests start. At the first request for ``logprobs`` each engine
# compiles the function that ranks them: 25 s that show nothing of ours. Tests of compiling unset it.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# Servers of tests are on this machine: clients reach them without a proxy. Both names are in use.
_asked_directly = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{_asked_directly},127.0.0.1,localhost"

PER_PROCESS = 4 << 30
"""Bytes of memory of a process of tests with the server that it has started."""

TOGETHER = "tests/server/live/"

TIERS = ("slow", "long")
HOW = {"slow": "tests/run --full", "long": "tests/run --long", "reduced": "tests/run --long"}

left_out: dict[str, set[str]] = {tier: set() for tier in HOW}


# A deadline would fail a test for what else the machine does.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")


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
    group.addoption(
        "--no-shrink",
        action="store_true",
        help="searches end with the first counterexample and look for no smaller one",
    )
    group.addoption(
        "--every",
        type=int,
        default=1,
        help="of each grid the first case and each n-th, of what is marked table all; a prime above 3 takes "
        "all values of short axes",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Each process its own cores and as many OpenMP threads, and so has what it starts. Two processes with two
    # threads each on two cores take five to ten times as long: the threads of one wait at every operation for
    # those the other keeps from running.
    cores = sorted(os.sched_getaffinity(0))
    if _is_worker(config):
        worker, workers = (config.workerinput[name] for name in ("workerid", "workercount"))
        first = int(worker.removeprefix("gw")) % len(cores)
        os.sched_setaffinity(0, cores[first::workers])
    elif workers := config.getoption("numprocesses", None):
        # Here, as a worker has counted its cores before it reads this file.
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(cores) // workers))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As ``--dist loadfile``, but a folder that shares a server stays together as well."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER if file.startswith(TOGETHER) else file

    return Together(config, log)


def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` is: a process per core, as far as there is memory for them; two at least."""
    memory = psutil.virtual_memory().available
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        memory = min(memory, int(text))
    return max(2, min(len(os.sched_getaffinity(0)), memory // PER_PROCESS))


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the part that runs alone, import only files with such tests: all of them load much of vLLM."""
    if config.option.cores != "alone" or not collection_path.name.startswith("test_"):
        return None
    return None if "mark.alone" in collection_path.read_text() else True


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
        # A long test of a slow file has both marks, and is long.
        unwanted = (tier for tier in TIERS if tier not in wanted)
        reason = next((tier for tier in unwanted if item.get_closest_marker(tier)), None)
        if cases[function] % config.option.every and not item.get_closest_marker("table"):
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


def pytest_collection_finish() -> None:
    # What the tests are made of stays to the end; collections of garbage need not look at it.
    gc.freeze()


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def _rank(item: pytest.Item) -> int:
    if _is_alone(item):
        return 2
    # Engines and servers take many seconds: first, so that no worker waits for another at the end.
    return 0 if item.get_closest_marker("e2e") else 1


# What a run says at its end


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
    if _is_worker(session.config):
        output: dict[str, Any] = session.config.workeroutput
        output["left_out"] = {tier: sorted(names) for tier, names in left_out.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for tier, names in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        left_out[tier].update(names)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    said = [f"{len(names)} {tier} ({HOW[tier]})" for tier, names in left_out.items() if names]
    if said:
        terminalreporter.write_sep("-", f"left out: {', '.join(said)}")
