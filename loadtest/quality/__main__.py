# SPDX-License-Identifier: Apache-2.0
"""What eviction costs in quality.

    python -m loadtest.quality                      # the embedded model, all policies and budgets
    python -m loadtest.quality --quick              # does it work?
    python -m loadtest.quality --resume FILE.jsonl  # the same options once more: what is left
    python -m loadtest.quality --report FILE.jsonl  # the tables again

Writes ``FILE.jsonl`` (a row per line, budget, measure and sample) and ``FILE.md``.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from loadtest.common.machine import describe_run
from loadtest.common.results import append_rows, result_path
from loadtest.quality.figures import Figures
from loadtest.quality.generation import Model
from loadtest.quality.lines import DEFAULT_LINES, parse_line, points
from loadtest.quality.measures import MEASURES
from loadtest.quality.measures.turns import LONGEST_CHAT
from loadtest.quality.offline import Offline
from loadtest.quality.rows import latest, read_rows
from loadtest.quality.runner import plan
from loadtest.quality.settings import parse_arguments, sizes_of
from loadtest.quality.sizes import Sizes
from loadtest.quality.tables import markdown


def main() -> None:
    """Measure what is left, then report."""
    args = parse_arguments()
    if args.report:
        report(list(args.report), args.report[0])
        return
    try:
        path = measure(args)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise SystemExit(f"python -m loadtest.quality: {error}") from error
    report([path], path)


def measure(args: argparse.Namespace) -> Path:
    """Run what the file lacks; returns the file.

    Raises:
        ValueError: an option does not fit the model or the file to be resumed.
    """
    sizes = sizes_of(args)
    path: Path = args.resume or result_path("quality-cpu", args.out)
    # Before minutes go into an engine.
    lines = [parse_line(name, args.recent) for name in args.policies or DEFAULT_LINES]
    measures = [MEASURES[name] for name in args.measures]
    longest = max(
        sizes.prompt_tokens + sizes.forced_tokens, round(1.2 * max(sizes.lengths)) + 200,
        sizes.ruler_tokens if "ruler" in args.measures else 0,
        # A problem takes less than half of its answer, what is said around it 100 tokens or so.
        2 * sizes.answer_tokens + 300 + round(1.5 * sizes.text_tokens)
        if {"reasoning", "code"} & {*args.measures} else 0,
        LONGEST_CHAT if "turns" in args.measures else 0,
    )  # fmt: skip
    model = Offline(
        args.model, dtype=args.dtype, max_len=longest, running=args.running, eager=args.eager,
        block_size=args.block_size, min_tokens=args.min_tokens, calibration=args.calibration,
    )  # fmt: skip
    try:
        if not model.forces:
            print("left out: nll, questions that come later (tokens cannot be forced here)")
            measures = [one for one in measures if not one.forces]
        samples = {m.name: m.samples(model, sizes) for m in measures}
        settings = comparable_settings(args, model, sizes)
        runs, rows = read_rows([path] if path.exists() else [])
        check_resumed(path, runs, settings)
        known = latest(rows)
        todo = plan(
            points(lines, args.budgets), samples, measures, known, control=not args.no_control
        )
        print(
            f"{len(todo.full)} answers with full KV, {len(todo.others)} with budgets; about "
            f"{todo.seconds / 60:.0f} minutes with the embedded model on 2 cores\nrows: {path}",
            flush=True,
        )
        if todo.cost:
            run = {"kind": "run", **describe_run("loadtest.quality"), "settings": settings}
            append_rows(path, [run])
            changed = todo.run(
                model, lambda row: append_rows(path, [row.to_json()]), known, texts=args.texts
            )
            if changed:
                print(f"warning: {changed} figures of full KV are not what {path.name} says: "
                      "was anything changed?")  # fmt: skip
    finally:
        model.close()
    return path


def report(files: list[Path], beside: Path) -> None:
    """The tables of rows, beside a file."""
    runs, rows = read_rows(files)
    # Rows of measures that are gone have no table.
    rows = [row for row in rows if row.measure in MEASURES]
    if not rows:
        raise SystemExit(f"no samples in {', '.join(file.name for file in files)}")
    figures = Figures.of(rows)
    text = markdown(figures, runs)
    print(f"\n{text}")
    beside.with_suffix(".md").write_text(f"# {beside.stem}\n\n{text}")
    print(f"report: {beside.with_suffix('.md')}")


def comparable_settings(args: argparse.Namespace, model: Model, sizes: Sizes) -> dict[str, Any]:
    """What rows have to agree in to be compared."""
    return {**model.description, "recent": args.recent, **dataclasses.asdict(sizes)}


SAME = ("engine", "model", "dtype", "block_size", "recent", "prompt_tokens", "forced_tokens", "lengths",
        "kv_min_tokens")  # fmt: skip


def check_resumed(path: Path, runs: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Rows of different settings must not get into one file.

    Raises:
        ValueError: the file was measured with other settings.
    """
    for run in runs:
        for key in SAME:
            before, now = run["settings"].get(key), settings.get(key)
            before, now = (tuple(v) if isinstance(v, list | tuple) else v for v in (before, now))
            if before != now:
                raise ValueError(
                    f"--resume: {path.name} was measured with {key} {before}, not {now}"
                )


if __name__ == "__main__":
    main()
