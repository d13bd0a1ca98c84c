# SPDX-License-Identifier: Apache-2.0
"""Every GPU kernel compiles, ptxas included, on machines that have no GPU, and spills no more than is known.

The interpreter accepts what the compiler refuses; this shows it without a GPU, with the Triton that servers
on GPUs have.
"""

import importlib
import os
import pkgutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.common.results import read_rows
from tests.cuda_triton import ROOT, cuda_triton, cuda_triton_version
from tests.interpreted import needs_triton, run_interpreted
from tests.processes import python

pytest.importorskip("triton")

from loadtest.kernels.forms import Shape, compiled, launch_everything, launches
from loadtest.kernels.resources import ARCHS, SHARED_LIMIT, taken

KERNELS = {
    "plan_pieces", "_attend", "finish", "_add_prompt_scores", "add_partial_sums", "_reset", "_select",
    "_move", "_compact_tables",
    "list_lanes", "share_lanes", "_attend_prompts", "list_keys",
}  # fmt: skip

STACK = {
    ("_add_prompt_scores", 120): 16,
    ("_add_prompt_scores", 80): 8, ("_add_prompt_scores", 89): 8, ("_add_prompt_scores", 100): 48,
    ("_attend_prompts", 90): 16, ("_select", 90): 16,
}  # fmt: skip
"""Bytes per thread that forms of a kernel take with Triton 3.7.1, two registers to twelve; all others none.
On sm_90
these are a form for chunks of heads that share slots, of a float32 cache, and the form for more than 4,096
candidates in blocks that are no power of two."""

REGISTERS, SHARED, WARPS = 65536, 227 << 10, 64
"""What one processor of Hopper has."""


def compiled_with_the_locks_triton(*arguments: str) -> list[dict[str, Any]]:
    """The rows of ``python -m loadtest.kernels.resources``."""
    with tempfile.TemporaryDirectory() as work:
        rows = Path(work) / "rows.jsonl"
        path = os.pathsep.join([str(cuda_triton()), str(ROOT)])
        environment = {"PYTHONPATH": path, "TRITON_CACHE_DIR": work}
        command = ("-m", "loadtest.kernels.resources", "--out", rows, *arguments)
        done = python(*command, cwd=ROOT, environment=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return read_rows(rows)


def check(rows: list[dict[str, Any]]) -> None:
    assert {row["versions"]["triton"] for row in rows} == {cuda_triton_version()}
    for shape, arch in {(row["shape"], row["arch"]) for row in rows}:
        mine = [row for row in rows if (row["shape"], row["arch"]) == (shape, arch)]
        assert {row["kernel"] for row in mine} >= KERNELS
    for row in rows:
        allowed = STACK.get((row["kernel"], row["arch"]), 0)
        assert row["stack_bytes"] <= allowed, f"spills: {row}"
        assert row["shared_bytes"] <= SHARED_LIMIT[row["arch"]], f"cannot be launched: {row}"


def programs(row: dict[str, Any]) -> int:
    """So many programs share a processor of Hopper; the estimates in the kernels' README rest on it."""
    # Registers come in eights per thread; a program's first KiB of shared memory is the system's.
    registers = -(-row["registers"] // 8) * 8 * 32 * row["warps"]
    return min(
        REGISTERS // registers, SHARED // (row["shared_bytes"] + 1024), WARPS // row["warps"]
    )


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper() -> None:
    rows = compiled_with_the_locks_triton("--archs", "90", "--shapes", "1")
    assert len(rows) > len(KERNELS)
    check(rows)
    assert not any(row["stack_bytes"] for row in rows)
    assert all(programs(row) >= 2 for row in rows if row["kernel"] == "_add_prompt_scores")


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(64, marks=pytest.mark.long), 128])
def test_programs_of_decodes_share_a_processor(size: int) -> None:
    """Four, as the plan assumes; where heads share slots as many as where they do not."""
    with launches(run=False) as noted:
        launch_everything(Shape(4, size, 16, torch.bfloat16))
    plain = [
        launch
        for form, launch in noted.items()
        if form.kernel == "_attend" and launch.signature["cap"] == "constexpr"
    ]
    shares = [launch.signature["lane_keys"] != "constexpr" for launch in plain]
    assert set(shares) == {False, True}
    for launch in plain:
        row = taken(compiled(launch, 90))
        assert row["stack_bytes"] == 0 and programs(row) >= 4, row


@pytest.mark.long
def test_every_kernel_compiles_for_every_gpu_and_shape() -> None:
    rows = compiled_with_the_locks_triton()
    check(rows)
    assert {row["arch"] for row in rows} == set(ARCHS)
    assert len({row["shape"] for row in rows if row["arch"] == 90}) == 6


@needs_triton
@pytest.mark.long
def test_kernels_equal_their_reference_with_the_locks_triton() -> None:
    folder = ROOT / "tests/kernels/triton"
    run_interpreted(sorted(folder.glob("test_*.py")), fast=True, long=False, first=cuda_triton())


def test_defaults_of_kernels_are_what_older_tritons_know() -> None:
    """Triton 3.6 makes numbers that are defaults constants, but not strings."""
    from triton.runtime.jit import JITFunction

    import h2o_vllm.kernels.triton as room

    functions = {
        function
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")
        for function in vars(importlib.import_module(module.name)).values()
        if isinstance(function, JITFunction)
    }
    assert len(functions) > 10
    for function in functions:
        for parameter in function.params:
            if parameter.has_default:
                assert not isinstance(parameter.default, str), (function.__name__, parameter.name)
