# SPDX-License-Identifier: Apache-2.0
"""An upgrade under load, and back: what is lost, and which version answers.

    python -m loadtest.fleet.upgrade --to /opt/next/.venv/bin/h2o-serve

Two replicas of this version behind vLLM's router. In the midst of the load one after the other is drained and
started again as the program that ``--to`` names; then, under load again, as what it was. Every answer says in
a header which version gave it. No client sends anything again: what fails is counted.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from h2o_vllm.models import default_model_dir
from loadtest.common.client import Client
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, Row, append_rows, publish, result_path
from loadtest.common.servers import H2O_SERVE
from loadtest.common.tables import markdown_table, provenance
from loadtest.common.tiny_model import make_tiny_model
from loadtest.fleet.accounts import account
from loadtest.fleet.incidents import drain
from loadtest.fleet.loaded import add_load_options, under_load
from loadtest.fleet.replicas import Fleet, with_router_version

__all__ = ["main", "markdown"]

REPLICAS = (("--kv-budget", "0.2"),) * 2


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write, print."""
    args = parse_arguments(argv)
    ways: dict[str, Sequence[str]] = {"upgrade": [args.to], "rollback": H2O_SERVE}
    if len({version_of(program) for program in ways.values()}) < 2:
        raise SystemExit(f"--to is {version_of(H2O_SERVE)} too: no answer would tell who gave it")
    path = result_path("fleet-upgrade", args.out)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model", default_model_dir())
        with Fleet(model, folder, REPLICAS, args.policy) as fleet:
            for number, (way, program) in enumerate(ways.items()):
                print(f"{way} ...", flush=True)
                before = versions(fleet)
                happened = under_load(
                    fleet, roll(fleet, program), args, folder / f"{way}.jsonl", salt=number
                )
                records = happened.run.records
                row = with_router_version(describe_run("loadtest.fleet.upgrade")) | {
                    "way": way, "rate": args.rate, "policy": args.policy,
                    "before": before, "after": versions(fleet), "seconds": happened.seconds,
                    "answered_by": Counter(record.server for record in records if record.whole),
                    **asdict(account(records, happened.logs, None)),
                }  # fmt: skip
                if row["before"] == row["after"]:
                    raise SystemExit(
                        f"--to is version {before[0]} too: no answer tells who gave it"
                    )
                rows.append(row)
                append_rows(path, [row])
    publish(path, markdown(rows))


def version_of(program: Sequence[str]) -> str:
    """As it says itself.

    Raises:
        SystemExit: it is no h2o-serve.
    """
    try:
        done = subprocess.run([*program, "--version"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{program[0]} is no h2o-serve: {error}") from error
    return done.stdout.strip()


def roll(fleet: Fleet, program: Sequence[str]) -> Callable[[], None]:
    """One replica after the other becomes ``program``; ends when the last has answered a request."""

    def happen() -> None:
        for number, replica in enumerate(fleet.replicas):
            replica.program = program
            drain(fleet, number)
            fleet.wait_until_served(number, 1)

    return happen


def versions(fleet: Fleet) -> list[str]:
    """Of the replicas, as their configuration tells."""
    configs = [Client(replica.url).get_json("/plugins/h2o/config") for replica in fleet.replicas]
    return [config["versions"]["h2o_vllm"] for config in configs]


def markdown(rows: Sequence[Row]) -> str:
    """The table, with what it was measured on."""
    table = markdown_table(
        ["", "requests", "answered", "by version", "refused", "broken off", "sent again by the router",
         "answered twice", "it took", "slowest first token"],
        [
            [
                f"{row['way']}: {row['before'][0]} to {row['after'][0]}",
                f"{row['requests']}", f"{row['answered']}",
                ", ".join(f"{name}: {count}" for name, count in sorted(row["answered_by"].items())),
                *(f"{row[key]}" for key in ("refused", "broken", "repeated", "twice")),
                f"{row['seconds']:.0f} s", f"{row['slowest']:.1f} s",
            ]
            for row in rows
        ],
    )  # fmt: skip
    origin = "\n".join(provenance(rows))
    return f"# An upgrade and its rollback\n\n{origin}\n{table}\n"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.fleet.upgrade", __doc__)
    parser.add_argument("--to", required=True, help="h2o-serve of the other version")
    add_load_options(parser, seconds=240.0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
