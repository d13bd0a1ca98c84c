# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: vLLM's kernel against ours, with scores and, on CPUs, without.

    python -m loadtest.kernels [--quick] [--threads 1] [--impls cpp,reference] [--dtype float32]
    python -m loadtest.kernels --device cuda [--quick]

Needs vLLM's build for the device. Every number is taken in rounds that run all contestants one after the
other in one process; a ratio is the median over rounds of (ours / stock in that round), printed with its
quartiles. Refuses to time anything that does not first reproduce the reference. Writes one JSON line per
configuration into ``loadtest/results/``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from loadtest.common.command import command_parser
from loadtest.common.machine import describe_run
from loadtest.common.results import RESULTS, append_rows, result_path
from loadtest.kernels.contract import DeviceBench


def main(argv: Sequence[str] | None = None) -> None:
    """Check, measure, print, write."""
    args = parse_arguments(argv)
    bench = open_bench(args)
    path = None
    if args.skip_gate:
        print("not checked, so nothing will be written\n")
    else:
        bench.gate()
        path = result_path(f"kernels-{args.device}", args.out)
    measure(bench, args, path)
    if path is not None:
        print(f"\nrows: {path}")


def measure(bench: DeviceBench, args: argparse.Namespace, path: Path | None) -> None:
    """All cases in order; rows go to ``path``, if there is one, as they come."""
    description = describe_run("loadtest.kernels") | bench.limits
    print(bench.heading())
    for case in bench.cases(args.quick):
        row = description | case(args.seconds)
        print(bench.line(row), flush=True)
        if path is not None:
            append_rows(path, [row])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.kernels", __doc__)
    add = parser.add_argument
    add(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device whose kernels are measured"
    )
    add("--quick", action="store_true", help="measure only a few small configurations")
    add("--threads", type=int, default=1, help="cpu: threads of each implementation")
    add("--impls", default="cpp", help="cpu: our implementations to measure, separated by commas")
    add(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="cpu: data type of the KV",
    )
    add(
        "--layout",
        choices=["NHD", "HND"],
        default="NHD",
        help="cuda: layout of the KV cache's blocks",
    )
    add("--seconds", type=float, default=2.0, help="seconds per configuration")
    add("--skip-gate", action="store_true",
        help="skip the correctness check and write no results, for trials that compute nothing")  # fmt: skip
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser.parse_args(argv)


def open_bench(args: argparse.Namespace) -> DeviceBench:
    """The device's."""
    if args.device == "cuda":
        from loadtest.kernels.cuda import CUDABench

        return CUDABench(args.layout)
    from loadtest.kernels.cpu import CPUBench

    return CPUBench(args.impls.split(","), args.threads, getattr(torch, args.dtype))
