# SPDX-License-Identifier: Apache-2.0
"""Hours of mixed load on a real server: whatever should stay flat, does it?

    python -m loadtest.reliability.soak --minutes 60 [--out loadtest/results] [-- h2o-serve options]

Starts ``h2o-serve`` with a pool that is too small for all, and clients that complete, chat, stream,
send bad budgets, leave half-way and come back. All the while samples resident memory, open files and
threads of the server's processes. Every two minutes all pause for a moment: then not one block may
be in use, and a request of always the same shape is timed. Writes JSON lines, says what grew, and
exits with 1 if anything did, or if a request failed.
"""

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.common.machine import describe_run
from loadtest.common.prometheus import read_metrics
from loadtest.common.results import RESULTS, Row, append_rows, result_path
from loadtest.common.servers import H2O_SERVE, Server
from loadtest.reliability.traffic import Traffic
from loadtest.reliability.trend import Bound, TrendCheck, judge

SAMPLE_SECONDS = 2.0
PAUSE_EVERY = 120.0
WARM_UP = 0.25
"""The first part of a run is not judged: caches fill, allocators reach their size."""

BOUNDS = (
    Bound("rss_mib", "MiB", per_hour=48.0, share=0.04),
    Bound("fds", "open files", per_hour=4.0, share=0.05),
    Bound("threads", "threads", per_hour=2.0, share=0.05),
    Bound("latency_s", "s", per_hour=0.0, share=0.30),
    Bound("idle_blocks", "share of the pool in use when idle", per_hour=0.0, share=0.0),
)
"""What may not grow by more than ``per_hour``, or ``share`` of its level over the judged part."""


class Soak(NamedTuple):
    """What a run has measured."""

    rows: list[Row]
    outcomes: dict[str, int]
    tracebacks: int
    server_command: str


def main(argv: Sequence[str] | None = None) -> int:
    """Soak; 0 if all was flat, every pause was quiet and no request failed."""
    args = parse_arguments(argv)
    path = result_path("soak", args.out, args.name)
    if path.exists():
        sys.exit(f"{path} exists")
    return publish(soak(args, path), args, path)


def soak(args: argparse.Namespace, path: Path) -> Soak:
    """Start the server, load it; rows go to ``path`` as they come."""
    options = ["--enforce-eager", "--max-model-len", "2048"]
    options += ["--num-gpu-blocks-override", str(args.blocks), *args.options]
    with tempfile.TemporaryDirectory() as folder:
        with Server(H2O_SERVE, options, Path(folder) / "log") as server:
            try:
                with progress(path, args.minutes) as show:
                    rows, outcomes = run(server, args, show)
            except BaseException:
                print(server.log()[-5000:], file=sys.stderr)
                raise
        return Soak(rows, outcomes, server.log().count("Traceback"), server.shown)


def publish(found: Soak, args: argparse.Namespace, path: Path) -> int:
    """Judge, write and print; returns the exit code."""
    checks = check_trends(found.rows)
    errors = [outcome for outcome in found.outcomes if outcome.startswith("error")]
    noisy = [row["pause"] for row in found.rows if not row.get("quiet", True)]
    flat = all(check.flat for check in checks)
    description = describe_run("loadtest.reliability.soak") | {
        "server_command": found.server_command,
        "outcomes": found.outcomes,
        "requests": sum(found.outcomes.values()),
        "tracebacks": found.tracebacks,
        "verdicts": [check.row() for check in checks],
        "flat": flat,
    }
    # With what can only be known at the end in front.
    path.unlink()
    append_rows(path, [description, *found.rows])
    for check in checks:
        print(check)
    print(f"{description['requests']} requests in {args.minutes:g} minutes: {found.outcomes}")
    print(f"tracebacks in the log: {found.tracebacks}; pauses that were not quiet: {noisy}")
    print("FLAT" if flat else "NOT FLAT", path)
    return int(not flat or bool(errors) or bool(noisy) or found.tracebacks > 0)


def run(
    server: Server, args: argparse.Namespace, show: Callable[[Row], None]
) -> tuple[list[Row], dict[str, int]]:
    """Load, sample, pause, look; the rows, each shown as it is measured, and the outcomes of all requests."""
    traffic, rows = Traffic(server.url, args.seed), []
    traffic.fill_kernels()
    traffic.start(args.users)
    started = time.monotonic()
    pauses = itertools.count(1)
    pause_every = min(PAUSE_EVERY, args.minutes * 60 / 4)
    next_pause = started + pause_every
    while (now := time.monotonic()) < started + args.minutes * 60:
        if now >= next_pause:
            row = {"pause": next(pauses), **sample_idle(server, traffic)}
            row |= sample(server, started)
            next_pause = time.monotonic() + pause_every
        else:
            row = sample(server, started)
            time.sleep(SAMPLE_SECONDS)
        rows.append(row)
        show(row)
    traffic.stop()
    return rows, dict(sorted(traffic.outcomes.items()))


def sample_idle(server: Server, traffic: Traffic) -> Row:
    """Let all clients finish, look whether a block is in use, and time the probe."""
    with traffic.paused() as quiet:
        row = {"quiet": quiet, "idle_blocks": idle_share(server.url)}
        # Alone, so that it measures the server and not its load.
        row["latency_s"] = round(min(traffic.probe() for _ in range(3)), 4)
    return row


def sample(server: Server, started: float) -> Row:
    """What the server weighs now."""
    import psutil

    main = psutil.Process(server.process.pid)
    rss = fds = threads = 0
    for process in (main, *main.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            rss += process.memory_info().rss
            fds += process.num_fds()
            threads += process.num_threads()
    return {
        "t": round(time.monotonic() - started, 1),
        "rss_mib": round(rss / 2**20, 1),
        "fds": fds,
        "threads": threads,
        **gauges(server.url),
    }


def gauges(url: str) -> dict[str, float]:
    """Blocks and requests as of now, from ``/metrics``."""
    found = read_metrics(url)
    return {
        "blocks_used": round(found["vllm:kv_cache_usage_perc"], 5),
        "running": found["vllm:num_requests_running"],
        "waiting": found["vllm:num_requests_waiting"],
        "preemptions": found["vllm:num_preemptions_total"],
    }


def idle_share(url: str) -> float:
    """Share of the pool in use without any request; the engine reports with a delay."""
    for _ in range(100):
        now = gauges(url)
        if not now["running"] and not now["waiting"] and not now["blocks_used"]:
            break
        time.sleep(0.1)
    return now["blocks_used"]


@contextlib.contextmanager
def progress(path: Path, minutes: float) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar of the time, and each row written as it comes: what a run that is stopped has seen stays."""
    from tqdm import tqdm

    layout = "{percentage:3.0f}% |{bar}| {n:.1f}/{total:g} min{postfix}"
    with tqdm(total=minutes, bar_format=layout) as bar:

        def show(row: dict[str, Any]) -> None:
            append_rows(path, [row])
            level = f"{row['rss_mib']:.0f} MiB, {row['fds']} files, {row['running']:.0f} running"
            bar.set_postfix_str(level, refresh=False)
            bar.update(min(row["t"] / 60, minutes) - bar.n)

        yield show


def check_trends(rows: Sequence[dict[str, Any]]) -> list[TrendCheck]:
    """What was flat and what was not, once warm."""
    end = max(row["t"] for row in rows)
    warm = [row for row in rows if row["t"] >= WARM_UP * end]
    return [
        judge(bound, [(row["t"] / 3600, row[bound.name]) for row in warm if bound.name in row])
        for bound in BOUNDS
    ]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.reliability.soak", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--minutes", type=float, default=60, help="minutes to run (default: %(default)s)")
    add("--users", type=int, default=8, help="number of clients (default: %(default)s)")
    add("--blocks", type=int, default=120, help="blocks of 32 tokens in the pool (%(default)s)")
    add("--seed", type=int, default=0, help="seed of what the clients do (default: %(default)s)")
    add("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    add("--name", help="name of the result files (default: soak-DATE)")
    add("options", nargs="*", help="options of h2o-serve, after --")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # The server is started with its own environment; this process needs none of vLLM's threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
