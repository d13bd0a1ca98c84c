# SPDX-License-Identifier: Apache-2.0
"""What each form of our GPU kernels takes of a processor: registers, spills, shared memory. No GPU is needed.

    python -m loadtest.kernels.resources [--archs 90] [--out rows.jsonl]

Compiles with the installed Triton and the ptxas that it brings. Servers on GPUs have another Triton than CPU
builds: ``deploy/locks/cuda.txt`` names it, and a folder of its own holds it,

    uv pip install --no-deps --target FOLDER "$(grep ^triton== deploy/locks/cuda.txt)"
    PYTHONPATH=FOLDER python -m loadtest.kernels.resources
"""

import argparse
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

from loadtest.common.command import command_parser
from loadtest.common.machine import describe_host
from loadtest.common.results import Row, append_rows, publish, result_path
from loadtest.common.tables import markdown_table, provenance
from loadtest.kernels.forms import Form, Launch, Shape, compiled, launch_everything, launches

ARCHS = (80, 89, 90, 100, 120)
"""A100, L40S and RTX 40, H100 and H200, B200, RTX 50: what the published table has."""
SHARED_LIMIT = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that one program may have (CUDA C++ programming guide, compute capabilities)."""

_HOPPER = 90
_FIRST_WITH_FP8 = 89
_SHAPES = (
    Shape(4, 128, 16, torch.bfloat16), Shape(8, 256, 528, torch.bfloat16),
    Shape(4, 128, 16, torch.float8_e4m3fn), Shape(32, 128, 32, torch.float16),
    Shape(7, 80, 16, torch.bfloat16), Shape(1, 96, 128, torch.float32),
)  # fmt: skip
_EVERYWHERE = 2
"""So many of them for every architecture, the others for Hopper alone: each takes a quarter of a minute."""


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, print, write."""
    args = parse_arguments(argv)
    path = args.out or result_path("kernel-resources")
    described = describe_host()
    described["versions"]["triton"] = triton.__version__
    described["command"] = "python -m loadtest.kernels.resources"
    rows = []
    for row in measure(args.archs, args.shapes):
        rows.append(described | row)
        append_rows(path, rows[-1:])
    publish(path, report(rows))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("loadtest.kernels.resources", __doc__)
    add = parser.add_argument
    add(
        "--archs",
        type=int,
        nargs="+",
        choices=ARCHS,
        default=list(ARCHS),
        help="compute capabilities; 90 is 9.0",
    )
    add(
        "--shapes",
        type=int,
        default=len(_SHAPES),
        help="number of shapes, the most common first",
    )
    add("--out", type=Path, help="file for the rows (default: a new one in loadtest/results)")
    return parser.parse_args(argv)


def measure(archs: Sequence[int], shapes: int) -> Iterator[Row]:
    """A row per shape, architecture and form."""
    for number, shape in enumerate(_SHAPES[:shapes]):
        with launches(run=False) as noted:
            launch_everything(shape)
        labels = _labels(noted)
        for arch in archs:
            if arch != _HOPPER and number >= _EVERYWHERE:
                continue
            if shape.dtype.itemsize == 1 and arch < _FIRST_WITH_FP8:
                continue
            for form, launch in noted.items():
                what = {"shape": str(shape), "kernel": form.kernel, "form": labels[form]}
                yield {**what, "arch": arch, **taken(compiled(launch, arch))}


def taken(kernel: Any) -> Row:
    """Registers and stack per thread, shared memory. Our kernels keep no arrays: stack is what spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said))
    return {
        "warps": kernel.metadata.num_warps,
        "registers": int(found["REG"]),
        "stack_bytes": int(found["STACK"]) + int(found["LOCAL"]),
        "shared_bytes": kernel.metadata.shared,
    }


def _labels(noted: dict[Form, Launch]) -> dict[Form, str]:
    """What tells the forms of one kernel apart: constants, and which arguments are given."""
    of_kernel: dict[str, list[Form]] = defaultdict(list)
    for form in noted:
        of_kernel[form.kernel].append(form)
    labels = {}
    for forms in of_kernel.values():
        for form in forms:
            differ = [
                (name, shown)
                for name, shown, column in zip(
                    noted[form].signature,
                    form.arguments,
                    zip(*(one.arguments for one in forms), strict=True),
                    strict=True,
                )
                if len(set(column)) > 1
            ]
            labels[form] = ", ".join(
                f"{name}={shown}" if name.isupper() else f"{'no ' * (shown == 'None')}{name}"
                for name, shown in differ
            )
    return labels


def report(rows: Sequence[Row]) -> str:
    """A table per shape: forms by architectures."""
    parts = ["# What the GPU kernels take of a processor", "", *provenance(rows)]
    parts += [
        "Registers per thread / KiB of shared memory per program; in bold the bytes that each thread spills.",
        "",
    ]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == shape]
        archs = sorted({row["arch"] for row in mine})
        cells: dict[tuple[str, str, int], dict[int, str]] = defaultdict(dict)
        for row in mine:
            cells[row["kernel"], row["form"], row["warps"]][row["arch"]] = _cell(row)
        head = ["kernel", "form", "warps", *(f"sm_{arch}" for arch in archs)]
        body = [
            [f"`{kernel}`", form, str(warps), *(by_arch.get(arch, "") for arch in archs)]
            for (kernel, form, warps), by_arch in cells.items()
        ]
        parts += [f"## {shape}", "", markdown_table(head, body), ""]
    return "\n".join(parts)


def _cell(row: Row) -> str:
    spilled = f" **{row['stack_bytes']}**" if row["stack_bytes"] else ""
    return f"{row['registers']} / {row['shared_bytes'] / 1024:.1f}{spilled}"


if __name__ == "__main__":
    main()
