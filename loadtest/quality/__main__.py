# SPDX-License-Identifier: Apache-2.0
"""What eviction costs in quality.

    python -m loadtest.quality --xsum FILE          # the embedded model, all policies, budgets and measures
    python -m loadtest.quality --quick              # does it work?
    python -m loadtest.quality --url http://host:8000 --measures retrieval long
    python -m loadtest.quality --resume FILE.jsonl  # the same options once more: what is left
    python -m loadtest.quality --report FILE.jsonl  # tables and picture again

Writes ``FILE.jsonl`` (a row per line, budget, measure and sample), ``FILE.md`` and ``FILE.png``.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from h2o_vllm.blocks.repetition import INSTRUCTION_TOKENS, PIECE_TOKENS
from h2o_vllm.config.policies import POLICIES, REPEAT_POLICIES
from h2o_vllm.config.request_fields import REQUEST_FIELDS
from loadtest.common.client import HTTPStatusError
from loadtest.common.machine import describe_host, describe_run, shown_command
from loadtest.common.results import append_rows
from loadtest.quality.figures import Figures
from loadtest.quality.generation import Model
from loadtest.quality.lines import default_lines, parse_line, points
from loadtest.quality.measures import MEASURES, Measure, Sample
from loadtest.quality.measures.xsum import longest_request
from loadtest.quality.offline import Offline
from loadtest.quality.rows import latest, read_rows
from loadtest.quality.runner import plan
from loadtest.quality.settings import output_path, parse_arguments, sizes_of
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
    except (HTTPStatusError, ModuleNotFoundError, OSError, ValueError) as error:
        raise SystemExit(f"python -m loadtest.quality: {error}") from error
    report([path], path)


def measure(args: argparse.Namespace) -> Path:
    """Run what the file lacks; returns the file.

    Raises:
        ValueError: an option does not fit the model, the server or the file to be resumed.
    """
    sizes, path = sizes_of(args), output_path(args)
    # Before minutes go into an engine.
    if not args.url:
        chosen_lines(args, POLICIES, REQUEST_FIELDS)
    model = open_model(args, sizes)
    try:
        measures = chosen_measures(args, model)
        samples = {m.generation: m.samples(model, sizes) for m in measures}
        settings = comparable_settings(args, model, sizes, samples)
        runs, rows = read_rows([path] if path.exists() else [])
        check_resumed(path, runs, settings)
        known = latest(rows)
        todo = plan(
            points(lines_for(args, model), args.budgets), samples, measures, known,
            control=not args.no_control,
        )  # fmt: skip
        print(
            f"{len(todo.full)} answers with full KV, {len(todo.others)} with budgets; about "
            f"{todo.seconds / 60:.0f} minutes with the embedded model on 2 cores\nrows: {path}",
            flush=True,
        )
        if todo.cost:
            append_rows(path, [{"kind": "run", **describe(args), "settings": settings}])
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
    """Tables and picture of rows, beside a file."""
    runs, rows = read_rows(files)
    if not rows:
        raise SystemExit(f"no samples in {', '.join(file.name for file in files)}")
    figures = Figures.of(rows)
    text = markdown(figures, runs)
    print(f"\n{text}")
    from loadtest.quality.plot import plot_quality

    image = plot_quality(figures, runs, beside.with_suffix(".png"))
    page = f"# {beside.stem}\n\n![loss by policy and budget]({image.name})\n\n{text}"
    beside.with_suffix(".md").write_text(page)
    print(f"report: {beside.with_suffix('.md')}\nplot: {image}")


def open_model(args: argparse.Namespace, sizes: Sizes) -> Model:
    """The engine, or the server."""
    if args.url:
        from loadtest.quality.live import Live

        live = Live(args.url, args.model, api_key=args.api_key, running=args.running)
        if live.floor is not None and live.floor > args.min_tokens:
            print(
                f"this server keeps at least {live.floor} tokens whatever the budget; "
                f"start it with --kv-min-tokens {args.min_tokens} to measure small budgets"
            )
        return live
    longest = max(
        sizes.prompt_tokens + sizes.forced_tokens, round(1.2 * max(sizes.lengths)) + 200,
        sizes.long_tokens + 128, longest_request(args.xsum) if args.xsum else 0,
        sizes.ruler_tokens if args.measures and "ruler" in args.measures else 0,
    )  # fmt: skip
    if any(name.startswith(REPEAT_POLICIES) for name in args.policies or ()):
        longest += INSTRUCTION_TOKENS + min(PIECE_TOKENS, longest)
    return Offline(
        args.model, dtype=args.dtype, max_len=longest, running=args.running, eager=args.eager,
        block_size=args.block_size, min_tokens=args.min_tokens, calibration=args.calibration,
    )  # fmt: skip


def lines_for(args: argparse.Namespace, model: Model) -> Any:
    """The lines, as the engine here or the server there knows them."""
    policies = getattr(model, "policies", None) or POLICIES
    return chosen_lines(args, policies, getattr(model, "fields", None) or REQUEST_FIELDS)


def chosen_lines(args: argparse.Namespace, policies: Any, fields: Any) -> Any:
    """Those asked for, else all."""
    names = args.policies or default_lines(policies, fields)
    return [parse_line(name, policies, args.recent) for name in names]


def chosen_measures(args: argparse.Namespace, model: Model) -> list[Measure]:
    """Those asked for, else all that can be measured; says what is left out."""
    names = args.measures or [name for name, measure in MEASURES.items() if measure.usual]
    kept, left_out = [], []
    for name in names:
        if MEASURES[name].forces and not model.forces:
            left_out.append(f"{name} (tokens cannot be forced there)")
        elif name == "xsum" and args.xsum is None:
            left_out.append("xsum (no --xsum FILE)")
        else:
            kept.append(MEASURES[name])
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    if not kept:
        raise ValueError("--measures: nothing left to measure")
    return kept


def comparable_settings(
    args: argparse.Namespace, model: Model, sizes: Sizes, samples: dict[str, list[Sample]]
) -> dict[str, Any]:
    """What rows have to agree in to be compared."""
    own = dataclasses.asdict(sizes)
    own["xsum_file"] = sizes.xsum_file.name if sizes.xsum_file else None
    counted = {name: len(some) for name, some in samples.items()}
    return {**model.description, "recent": args.recent, **own, "samples": counted}


SAME = ("model", "dtype", "block_size", "recent", "prompt_tokens", "forced_tokens", "lengths", "long_tokens",
        "kv_min_tokens", "xsum_file")  # fmt: skip


def check_resumed(path: Path, runs: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Rows of different settings must not get into one file.

    Raises:
        ValueError: the file was measured with other settings.
    """
    for run in runs:
        for key in SAME:
            before, now = run["settings"].get(key), settings.get(key)
            before, now = (tuple(v) if isinstance(v, list | tuple) else v for v in (before, now))
            # Before a run with xsum there may have been one without.
            if before != now and not (key == "xsum_file" and None in (before, now)):
                raise ValueError(
                    f"--resume: {path.name} was measured with {key} {before}, not {now}"
                )


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Where, when, with which versions: here, of a server's machine nothing is known."""
    where = describe_host() if args.url else describe_run("loadtest.quality")
    return {**where, "command": shown_command("python -m loadtest.quality")}


if __name__ == "__main__":
    main()
