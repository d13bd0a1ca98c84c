# SPDX-License-Identifier: Apache-2.0
"""A fleet under Locust's load, in the midst of which something happens."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from loadtest.fleet.replicas import POLICIES, Fleet, served
from loadtest.http.headless import locust_running
from loadtest.http.records import Run, read_runs

__all__ = ["Happened", "add_load_options", "under_load"]

BEFORE = 10.0
"""Seconds of load before anything happens."""


class Happened(NamedTuple):
    """The requests, what each replica logged meanwhile, and how long it took until all was well."""

    run: Run
    logs: list[str]
    seconds: float


def under_load(
    fleet: Fleet, happen: Callable[[], None], args: argparse.Namespace, file: Path, *, salt: int
) -> Happened:
    """Load the fleet; ``happen`` ends when all is well again.

    Args:
        args: has what :func:`add_load_options` adds. file: where Locust writes. salt: other prompts for each.
    """
    marks, answers = fleet.marks(), [served(replica.url) for replica in fleet.replicas]
    options = {
        "--host": fleet.router.url, "--model": "model", "-u": 1, "--arrival": "open",
        "--rate": args.rate, "-t": f"{args.seconds:g}s", "--stop-timeout": 60,
        "--prompt-tokens": args.prompt_tokens, "--output-tokens": args.output_tokens,
        "--salt": salt, "--jsonl": file, "--exit-code-on-error": 0,
        # Answers of this route are logged.
        "--endpoint": "chat",
    }  # fmt: skip
    with locust_running(options):
        # Locust takes a while to start.
        for number, before in enumerate(answers):
            fleet.wait_until_served(number, before + 2)
        time.sleep(BEFORE)
        began = time.monotonic()
        happen()
        seconds = time.monotonic() - began
    (run,) = read_runs(file)
    return Happened(run, fleet.logs_since(marks), seconds)


def add_load_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """The load, and where results go; ``seconds`` is a default."""
    add = parser.add_argument
    add("--policy", choices=POLICIES, default="round_robin", help="of the router")
    add("--rate", type=float, default=1.0, help="requests per second")
    add("--seconds", type=float, default=seconds, help="of load")
    add("--prompt-tokens", type=int, default=300, help="mean length of prompts")
    add("--output-tokens", type=int, default=200, help="length of answers")
