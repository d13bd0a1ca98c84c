# SPDX-License-Identifier: Apache-2.0
"""How long steps take on this machine: some minutes of designed batches, and a fit of them.

    python -m loadtest.plan.calibrate [--model DIRECTORY] [--dtype float32] [--out calibration.json]

Starts vLLM with our flags, and ours, one after the other, with ample memory. What each step computed is
counted where it is decided, as a simulation counts it. Writes a file for ``python -m loadtest.plan
--calibration`` and says how far the fit is from what was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from h2o_vllm.models import default_model_dir
from loadtest.common.child import Child
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.tables import markdown_table
from loadtest.engine.workloads import SUITES, Setting
from loadtest.plan.calibration import OURS, STOCK, Calibration, Measured, write_calibration
from loadtest.plan.fit import MeasuredStep, fit, residual, typical_steps
from loadtest.plan.recording import read_steps
from loadtest.plan.work import FEATURES

__all__ = ["add_engine_options", "calibrate", "engine_options", "main", "table"]

VARIANTS = {STOCK: "stock-same-flags", OURS: "h2o"}
"""By the names of :mod:`loadtest.engine`, whose engine options both get."""

SETTING = Setting(2048)
"""Ample memory."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, fit, write."""
    parser = command_parser("loadtest.plan.calibrate", __doc__)
    add_engine_options(parser)
    parser.add_argument("--repeat", type=int, choices=range(1, 10), default=3, metavar="N",
        help="serve the batches so often, 1 to 9, after once to warm up; medians count")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("calibration.json"), help="file")
    args = parser.parse_args(argv)
    calibration = calibrate(args)
    write_calibration(calibration, args.out)
    print(f"\n{table(calibration)}\n\n{args.out}")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Those of the engines that are measured."""
    add = parser.add_argument
    add("--model", help="a model directory; by default the embedded model")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV")
    add("--eager", action="store_true", help="no torch.compile: engines start within seconds")


def calibrate(args: argparse.Namespace) -> Calibration:
    """Both engines, one after the other."""
    found = {}
    with TemporaryDirectory() as folder:
        for name in VARIANTS:
            print(f"calibrating {name}", flush=True)
            found[name] = _measured(args, name, Path(folder) / f"{name}.jsonl")
    steps = {name: steps for name, (steps, _) in found.items()}
    linears = dict(zip(VARIANTS, fit(*(steps[name] for name in VARIANTS)), strict=True))
    engines = {
        name: Measured(linears[name], residual(linears[name], steps[name]), scheduling)
        for name, (_, scheduling) in found.items()
    }
    about = describe_run("loadtest.plan.calibrate") | {
        "model": Path(args.model).name if args.model else "embedded",
        "dtype": args.dtype,
        "eager": args.eager,
    }
    return Calibration(engines, about)


def engine_options(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Engine arguments of a variant, our switch not included."""
    options = SUITES["cpu"].engine_options(SETTING, VARIANTS[name])
    return options | {"dtype": args.dtype, "enforce_eager": args.eager}


def _measured(
    args: argparse.Namespace, name: str, path: Path
) -> tuple[list[MeasuredStep], Mapping[str, Any]]:
    first = {
        "model": args.model or str(default_model_dir()),
        "ours": name == OURS,
        "steps": str(path),
        "engine": engine_options(args, name),
    }
    with Child("loadtest.plan.calibrate_run", first) as child:
        scheduling = child.request("warm up")
        rounds = []
        for _ in range(args.repeat):
            path.unlink()
            child.request("batches")
            rounds.append(read_steps(path))
    return typical_steps(rounds), scheduling


def table(calibration: Calibration) -> str:
    """What each engine's steps cost, in microseconds, and how good the fit is. Markdown."""
    head = ["", *calibration.engines]
    engines = calibration.engines.values()
    costs = [(one.linear.constant, *one.linear.costs) for one in engines]
    rows = [
        [name, *(f"{1e6 * value[place]:.4g} us" for value in costs)]
        for place, name in enumerate(("constant", *FEATURES))
    ]
    for name, label in (("total", "all steps"), ("typical", "median step"), ("worst", "p90 step")):
        errors = [asdict(one.residual)[name] for one in engines]
        rows.append([f"error, {label}", *(f"{100 * error:+.1f} %" for error in errors)])
    rows.append(["steps", *(str(one.residual.steps) for one in engines)])
    return markdown_table(head, rows)


if __name__ == "__main__":
    main()
