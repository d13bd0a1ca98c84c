# SPDX-License-Identifier: Apache-2.0
"""Failures under load: what is lost, repeated or answered twice, and when all is well again.

    python -m loadtest.fleet.failures [--incidents kill-replica drain ...] [--rate 1] [--seconds 150]

Two replicas of ``h2o-serve`` behind vLLM's router (``pip install vllm-router``), a tiny model, and Locust,
which sends requests at random times and waits for no answer. In the midst of it something happens to one
replica, or to the router. No client sends anything again: what fails is counted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from h2o_vllm.models import default_model_dir
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, Row, append_rows, publish, result_path
from loadtest.common.tables import markdown_table, provenance
from loadtest.common.tiny_model import make_tiny_model
from loadtest.fleet.accounts import account
from loadtest.fleet.incidents import INCIDENTS, VICTIM, Incident
from loadtest.fleet.loaded import add_load_options, under_load
from loadtest.fleet.replicas import Fleet, with_router_version

__all__ = ["main", "markdown"]

REPLICAS = (("--kv-budget", "0.2"),) * 2


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print."""
    args = parse_arguments(argv)
    path = result_path("fleet-failures", args.out)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model", default_model_dir())
        with Fleet(model, folder, REPLICAS, args.policy) as fleet:
            for number, incident in enumerate(args.incidents):
                print(f"{incident} ...", flush=True)
                file = folder / f"{number}.jsonl"
                row = with_router_version(describe_run("loadtest.fleet.failures"))
                row |= {"incident": incident}
                row |= measure(fleet, INCIDENTS[incident], args, file, salt=number)
                rows.append(row)
                append_rows(path, [row])
                print(row, flush=True)
    publish(path, markdown(rows))


def measure(
    fleet: Fleet, incident: Incident, args: argparse.Namespace, file: Path, *, salt: int
) -> Row:
    """Load, and in the midst of it the incident. Returns the account, and the seconds until all was well."""

    def happen() -> None:
        incident.happen(fleet)
        if incident.restarts:
            fleet.wait_until_served(VICTIM, 1)

    happened = under_load(fleet, happen, args, file, salt=salt)
    victim = VICTIM if incident.hits_replica else None
    found = account(happened.run.records, happened.logs, victim)
    return {"rate": args.rate, "policy": args.policy, "back_s": happened.seconds, **asdict(found)}


def markdown(rows: Sequence[Row]) -> str:
    """The table of all incidents, with what it was measured on."""
    table = markdown_table(
        ["", "requests", "answered", "refused", "broken off", "of them, never at the replica hit",
         "sent again by the router", "answered twice", "all well after", "slowest first token"],
        [
            [
                INCIDENTS[row["incident"]].says,
                *(f"{row[key]}" for key in ("requests", "answered", "refused", "broken")),
                "" if row["noticed"] is None else f"{row['noticed']}",
                f"{row['repeated']}", f"{row['twice']}", f"{row['back_s']:.0f} s",
                f"{row['slowest']:.1f} s",
            ]
            for row in rows
        ],
    )  # fmt: skip
    about = "\n".join(
        f"* {INCIDENTS[row['incident']].says}: {error or 'the stream ended'}: {times}"
        for row in rows
        for error, times in row["errors"].items()
    )
    origin = "\n".join(provenance(rows))
    return f"# Failures\n\n{origin}\n{table}\n\nHow requests failed:\n\n{about or '* none did'}\n"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.fleet.failures", __doc__)
    add, names = parser.add_argument, list(INCIDENTS)
    add("--incidents", nargs="+", choices=names, default=names, help="what happens")
    add_load_options(parser, seconds=150.0)
    add("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
