# SPDX-License-Identifier: Apache-2.0
"""The planner against rows of ``loadtest.engine``: each workload is simulated with what the others took.

    python -m loadtest.plan.validate ROWS.jsonl... [--variant h2o]

How many requests run at once follows from counts alone. The seconds of a step are fitted to the other
workloads of the same variant, so that the row that is simulated has no part in its own calibration.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loadtest.common.command import command_parser
from loadtest.common.results import Row, read_rows
from loadtest.common.tables import markdown_table
from loadtest.engine.suites import STOCK_CPU_BLOCK_SIZE, SUITES
from loadtest.engine.workloads import Workload
from loadtest.plan.cost import fitted
from loadtest.plan.simulate import Load, Outcome, Pool, Request, Step, simulate

__all__ = ["Compared", "compare"]


@dataclass(frozen=True)
class Compared:
    """One workload: measured medians, and what was simulated."""

    workload: str
    running: float
    tok_per_s: float
    simulated: Outcome


def _requests_of(workload: Workload, *, ours: bool) -> list[Request]:
    """The requests of a row of the table, as the simulation takes them.

    Raises:
        ValueError: it has chats, several answers or elastic budgets, which are not simulated.
    """
    found = []
    for number, prompt in enumerate(workload.prompt_lengths()):
        fields = (workload.asked(number) if ours else None) or {}
        if (
            set(fields) - {"kv_budget", "kv_prefill_tokens", "kv_protect"}
            or fields.get("kv_protect", 0)
            or workload.turns > 1
            or workload.answers > 1
        ):
            raise ValueError(f"{workload.name} is not simulated")
        load = Load(fields.get("kv_budget", 1.0), prefill=fields.get("kv_prefill_tokens", 0))
        found.append(Request(prompt, workload.output_tokens, load))
    return found


def compare(rows: Sequence[Row], variant: str) -> list[Compared]:
    """Every workload of a variant that can be simulated, on CPU.

    Raises:
        ValueError: too little else was measured.
    """
    suite = SUITES["cpu"]
    # Full KV on our kernel takes what ours takes.
    alike = suite.own if variant in suite.own else (variant,)
    mine: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["workload"] in suite.workloads and row["variant"] in alike and "fields" not in row:
            mine.setdefault((row["variant"], row["workload"]), []).append(row)

    def run(key: tuple[str, str], seconds: Callable[[Step], float]) -> Outcome:
        requests = _requests_of(suite.workloads[key[1]], ours=key[0] == "h2o")
        size = STOCK_CPU_BLOCK_SIZE if key[0] == "stock" else 32
        return simulate(requests, Pool(int(mine[key][0]["num_blocks"]) - 1, size), seconds)

    sums = {key: run(key, lambda _: 1.0).sums for key in mine}
    walls = {key: median(row["wall_s"] for row in found) for key, found in mine.items()}
    compared = []
    for key, found in mine.items():
        others = [other for other in mine if other != key]
        if key[0] != variant:
            continue
        if len(others) < 2:
            raise ValueError(
                f"{variant}: {key[1]} is simulated with what others took: measure two more"
            )
        seconds, _ = fitted([sums[other] for other in others], [walls[other] for other in others])
        running = median(row["running_mean"] for row in found)
        speed = median(row["tok_per_s"] for row in found)
        compared.append(Compared(key[1], running, speed, run(key, seconds)))
    return compared


def table(compared: Sequence[Compared]) -> str:
    """Markdown."""
    head = ["workload", "running measured", "simulated", "tok/s measured", "simulated", "off"]
    lines = [
        [
            one.workload, f"{one.running:.1f}", f"{one.simulated.running_mean:.1f}", f"{one.tok_per_s:.1f}",
            f"{one.simulated.tok_per_s:.1f}", f"{100 * (one.simulated.tok_per_s / one.tok_per_s - 1):+.0f} %",
        ]
        for one in compared
    ]  # fmt: skip
    return markdown_table(head, lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.plan.validate", __doc__)
    parser.add_argument(
        "rows", nargs="+", type=Path, help="files of loadtest.engine, one machine's"
    )
    parser.add_argument("--variant", default="h2o", help="the rows of which")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, print."""
    args = parse_arguments(argv)
    rows = [row for path in args.rows for row in read_rows(path)]
    try:
        print(table(compare(rows, args.variant)))
    except ValueError as error:
        raise SystemExit(f"python -m loadtest.plan.validate: {error}") from error


if __name__ == "__main__":
    main()
