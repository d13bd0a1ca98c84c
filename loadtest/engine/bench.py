# SPDX-License-Identifier: Apache-2.0
"""Throughput of h2o_vllm against stock vLLM: same prompts, same run, alternating processes.

    python -m loadtest.engine [--workloads tight ample ...] [--rounds 3] [--out loadtest/results]
    python -m loadtest.engine --device cuda [--shape 8b] [--workloads 2k-tight ...]
    python -m loadtest.engine --variants h2o --fields kv_policy=key    # what another policy costs

Each variant is an engine in a process of its own, warmed up and with an empty prefix cache for each
measurement. On CPU those of one setting live side by side, and only one works at a time; on a GPU each has
the device to itself, unless ``--side-by-side`` starts those of a setting together. Rounds alternate the
variants, so that a slow minute of the machine hits all of them; ratios are taken within a round, then their
median. Writes one JSONL row per measurement as soon as it is made, two tables and a PNG. ``--resume FILE``
goes on where an interrupted run stopped.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_vllm.config.settings import REQUEST_FIELDS
from loadtest.common.child import Child
from loadtest.common.command import command_parser
from loadtest.common.machine import describe_gpu
from loadtest.common.measuring import carry_out, missing
from loadtest.common.results import RESULTS, Measured, Row, read_rows, result_path
from loadtest.engine.models import SHAPES, make_model
from loadtest.engine.suites import SUITES, Suite, suite_of
from loadtest.engine.tables import measured_table, ratio_table
from loadtest.engine.workloads import Engine, Start


@dataclass(frozen=True)
class Measurement(Measured):
    """One variant serving one workload in one round."""

    round: int
    variant: str
    workload: str


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, then publish."""
    args = parse_arguments(argv)
    path = args.resume or result_path(f"bench-{args.device}", args.out)
    rows = measure(args, path)
    publish(rows, SUITES[args.device], path)


def measure(args: argparse.Namespace, path: Path) -> list[Row]:
    """Run what ``path`` lacks, appending to it; returns all rows."""
    suite = suite_of(args.device, shared=args.side_by_side)
    plan = missing(planned(suite, args.workloads, args.variants, args.rounds), read_rows(path))
    with Engines(suite, engine_of(args), plan) as engines:
        return carry_out(
            plan,
            path,
            "loadtest.engine",
            about_run(args),
            engine_of=engines.get,
            line=lambda one: one.workload,
            shown=lambda one: f"round {one.round + 1} {one.variant}: {one.workload}",
            said=lambda row: f"{row['tok_per_s']:.1f} tok/s",
        )


def publish(rows: list[Row], suite: Suite, path: Path) -> None:
    """Print the tables; write the picture beside the rows."""
    print(f"\n{measured_table(rows)}\n\n{ratio_table(rows, suite)}\n\nrows: {path}")
    try:
        from loadtest.engine.plot import plot_bench
    except ModuleNotFoundError as error:
        # A GPU host may lack matplotlib.
        print(f"no plot: {error}; with it, --resume {path} draws one")
        return
    print(f"plot: {plot_bench(rows, suite, path.with_suffix('.png'))}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; each device has its own workloads and models."""
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument(
        "--device",
        choices=list(SUITES),
        default="cpu",
        help="device to measure; each has its own options, see --device cuda --help",
    )
    name = device.parse_known_args(argv)[0].device
    suite = SUITES[name]
    parser = command_parser("loadtest.engine", __doc__, [device])
    add = parser.add_argument
    workloads, variants = list(suite.workloads), list(suite.variants)
    add(
        "--workloads",
        nargs="+",
        choices=workloads,
        default=[*suite.usual],
        help="workloads to serve",
    )
    usual = [one for one in variants if one not in suite.named]
    add(
        "--variants",
        nargs="+",
        choices=variants,
        default=usual,
        help="engines and settings to compare",
    )
    add("--rounds", type=int, default=3, help="runs of each variant; the variants alternate")
    add(
        "--scale",
        type=float,
        default=1.0,
        help="factor for all lengths and pool sizes; below 1 for a short trial",
    )
    add("--fields", nargs="+", type=_field, default=[], metavar="NAME=VALUE",
        help="more request fields for requests with a budget, such as kv_policy=value")  # fmt: skip
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="calibration of the model (default: that of the embedded model)",
    )
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    add("--resume", type=Path, help="JSONL file of an earlier run; only missing rows are measured")
    if name == "cuda":
        add(
            "--shape",
            choices=SHAPES,
            default="8b",
            help="size of the model, which has random weights",
        )
        add(
            "--quantization",
            choices=["fp8"],
            help="quantization of the weights when they are loaded",
        )
        add("--block-size", type=int, help="tokens per block (default: 16)")
        add("--profile", type=int, metavar="STEPS",
            help="trace so many decode steps by torch's profiler, beside the rows")  # fmt: skip
        add("--side-by-side", action="store_true",
            help="keep both engines on the device and let one work at a time; needs "
            "memory for two")  # fmt: skip
    else:
        parser.set_defaults(side_by_side=False)
        add("--model", help="model directory (default: the embedded model)")
        add(
            "--dtype",
            choices=("bfloat16", "float32"),
            default="bfloat16",
            help="data type of weights and KV",
        )
        add("--eager", action="store_true", help="do not compile the model with torch.compile")
    return parser.parse_args(argv)


def engine_of(args: argparse.Namespace) -> Engine:
    """What the measuring processes are told beside setting and variant."""
    calibration = args.calibration
    if args.device == "cuda":
        model = str(make_model(args.shape, Path(tempfile.gettempdir())))
    elif args.model is None:
        from h2o_vllm.models import default_calibration, default_model_dir

        # As h2o-serve has it.
        model, calibration = str(default_model_dir()), calibration or default_calibration()
    else:
        model = args.model
    engine: dict[str, Any] = {}
    if args.device == "cpu":
        engine = {"dtype": args.dtype, "enforce_eager": args.eager}
    else:
        engine = _differing(args)
        if args.profile:
            engine["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": str(args.out.absolute() / "profile"),
                "torch_profiler_with_stack": False,
                "max_iterations": args.profile,
            }
    return {
        "device": args.device, "model": model, "scale": args.scale, "engine": engine,
        "fields": dict(args.fields), "side_by_side": args.side_by_side,
        "calibration": calibration and str(calibration.absolute()),
    }  # fmt: skip


def about_run(args: argparse.Namespace) -> dict[str, Any]:
    """What rows say of their device beside the machine, and of what requests asked for."""
    fields = {"fields": dict(args.fields)} if args.fields else {}
    if args.device == "cuda":
        beside: dict[str, Any] = {"side_by_side": True} if args.side_by_side else {}
        return {**describe_gpu(), "shape": args.shape, **beside, **_differing(args), **fields}
    return {"dtype": args.dtype, "eager": args.eager, **fields}


def _differing(args: argparse.Namespace) -> dict[str, Any]:
    """Engine arguments on a GPU that are not the suite's."""
    asked = {"quantization": args.quantization, "block_size": args.block_size}
    return {name: value for name, value in asked.items() if value is not None}


def _field(text: str) -> tuple[str, Any]:
    """``NAME=VALUE``: a value is JSON, or else a string.

    Raises:
        argparse.ArgumentTypeError: it is no field of a request.
    """
    name, _, value = text.partition("=")
    if name not in REQUEST_FIELDS or not value:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted NAME=VALUE with one of {', '.join(REQUEST_FIELDS)}"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


class Engines(ExitStack):
    """The engines that live now: those of one setting, or one where they cannot live side by side.

    Args:
        plan: what will be measured; engines that start together are those of a setting in it.
    """

    def __init__(self, suite: Suite, told: Engine, plan: Sequence[Measurement]) -> None:
        super().__init__()
        self._suite = suite
        self._told = told
        self._plan = plan
        self._serving: object = None
        self._live: dict[str, Child] = {}

    def get(self, one: Measurement) -> Child:
        """The engine of a measurement, started if it does not live."""
        setting = self._setting(one)
        # An engine that has the device to itself serves one round.
        serving = setting if self._suite.side_by_side else (setting, one.variant, one.round)
        if serving != self._serving:
            self.close()
            self._live.clear()
            self._serving = serving
        if one.variant not in self._live:
            planned_here = [other for other in self._plan if self._setting(other) == setting]
            wanted = planned_here if self._suite.together else [one]
            self._start(setting, list(dict.fromkeys(each.variant for each in wanted)))
        return self._live[one.variant]

    def _start(self, setting: str, variants: Sequence[str]) -> None:
        print(f"starting {', '.join(variants)} for {setting} workloads", flush=True)
        for variant in variants:
            first: Start = {**self._told, "setting": setting, "variant": variant}
            child = Child("loadtest.engine.run", {**first}, wait=False)
            self._live[variant] = self.enter_context(child)
        for variant in variants:
            start_s = self._live[variant].answered["start_s"]
            print(f"{variant} is up after {start_s:.1f} s", flush=True)

    def _setting(self, one: Measurement) -> str:
        return self._suite.workloads[one.workload].setting


def planned(
    suite: Suite, workloads: Sequence[str], variants: Sequence[str], rounds: int
) -> Iterator[Measurement]:
    """All measurements in order: engines that live side by side serve all rounds before they end."""
    turns = [(turn, setting) for turn in range(rounds) for setting in suite.settings]
    if suite.side_by_side:
        turns.sort(key=lambda turn: list(suite.settings).index(turn[1]))
    for turn, setting in turns:
        for variant in variants:
            for workload in suite.to_measure(workloads, variant):
                if suite.workloads[workload].setting == setting:
                    yield Measurement(turn, variant, workload)
