# SPDX-License-Identifier: Apache-2.0
"""What the estimate of the column sums' price rests on: how many programs share a Hopper processor.

From compiled code, without a GPU; the estimate is in ``h2o_vllm/kernels/README.md``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton

from h2o_vllm.kernels.triton import PromptSegments, add_prompt_scores
from tests.kernels.test_triton_compiles import Call, compile_for_hopper

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
REGISTERS, SHARED, WARPS = 65536, 227 << 10, 64  # of one processor of sm_90


class Compiled(NamedTuple):
    """One program: registers of a thread, bytes spilled by it, shared memory, programs per processor."""

    registers: int
    spilled: int
    shared: int
    programs: int


def resources(call: Call, folder: Path) -> Compiled:
    kernel = compile_for_hopper(call)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None
    registers, spilled = map(int, found.groups())
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    # Registers come in eights per thread; a program's first KiB of shared memory is the system's.
    return Compiled(
        registers,
        spilled,
        shared,
        min(REGISTERS // (-(-registers // 8) * 8 * 32 * warps), SHARED // (shared + 1024), WARPS // warps),
    )  # fmt: skip


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton has no cuobjdump")
@pytest.mark.parametrize("size", [64, 128])
def test_programs_of_the_column_sums_share_a_processor(
    size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One multiplies while another takes exponentials: one alone keeps neither busy."""
    from triton.runtime.jit import JITFunction

    calls: dict[str, Call] = {}

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        calls[self.fn.__name__] = self, args, kwargs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(JITFunction, "run", note)
    keys = torch.zeros(4, 16, 2, size, dtype=torch.bfloat16)
    query, numbers = keys.view(-1, 8, size), torch.zeros(4, 8, dtype=torch.int32)
    prompts = PromptSegments.cut([0], [0], [2], [257], [16], 2, "cpu")
    add_prompt_scores(
        query, keys, torch.zeros(4, 2, 16), numbers, numbers[0], numbers[0], torch.zeros(8, 16), 1.0,
        prompts,
    )  # fmt: skip
    found = resources(calls["_add_prompt_scores"], tmp_path)
    assert found.spilled == 0 and found.programs >= 2, found
