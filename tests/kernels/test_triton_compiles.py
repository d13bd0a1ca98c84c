# SPDX-License-Identifier: Apache-2.0
"""Every GPU kernel compiles for Hopper, ptxas included, on machines that have none.

The interpreter accepts what the compiler refuses; this shows it without a GPU, for the installed Triton.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from h2o_vllm.kernels.triton import (
    DecodeWorkspace,
    KVLayers,
    compact_tables,
    prompt_lse,
    warm_up,
)

NAMES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
    torch.int64: "*i64", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
SHAPES = [  # (group, head size, block size, dtype)
    (4, 128, 16, torch.bfloat16), (3, 64, 32, torch.float16), (7, 80, 16, torch.bfloat16),
    (8, 256, 64, torch.bfloat16), (1, 96, 128, torch.float32), (4, 128, 16, torch.float8_e4m3fn),
]  # fmt: skip

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def calls_of_a_step(group: int, size: int, block_size: int, dtype: torch.dtype) -> None:
    """Everything a worker calls, in all forms, on CPU tensors: only their types are looked at."""
    kv = torch.zeros(4, block_size, 2, 2 * size, dtype=dtype)
    keys, values = kv.split(size, dim=-1)
    scores = torch.zeros(2, 4, 2, block_size)
    out_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    workspace = DecodeWorkspace(4, 64, 2 * group, 2, out_dtype, size, "cpu")
    query = torch.zeros(2, 2 * group, size, dtype=dtype)
    scales = [torch.ones(()) for _ in range(3)] if dtype.itemsize == 1 else []
    layers = KVLayers([keys, keys], [values, values])
    warm_up(layers, scores, workspace, query, query.to(out_dtype), *scales)
    rows = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 8, dtype=torch.int32)
    flags = torch.zeros(2, dtype=torch.int8)
    compact_tables(table, rows, flags, block_size, table.clone(), rows, rows, rows)
    if not scales:
        starts = torch.zeros(3, dtype=torch.int32)
        lse = torch.zeros(2 * group, 2)
        prompt_lse(query, keys, table, starts, rows, 1.0, lse, 2, rows)


def compile_for_hopper(call: Call) -> Any:
    """As Triton's launcher would for these arguments; see ``triton.runtime.jit.JITFunction.run``."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, args, kwargs = call
    names = function.arg_names
    options = {name: kwargs[name] for name in ("num_warps", "num_stages") if name in kwargs}
    given = dict(zip(names, args, strict=False)) | {n: kwargs[n] for n in names if n in kwargs}
    signature, constants, attributes = {}, {}, {}
    for position, name in enumerate(names):
        value, parameter = given[name], function.params[position]
        if parameter.is_constexpr or value is None:
            signature[name] = "constexpr"
            constants[(position,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = NAMES[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.skipif(
    not any(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*"))
    and not shutil.which("ptxas"),
    reason="this Triton has no ptxas",
)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            shape, marks=[pytest.mark.slow] if at else [], id="G{}-D{}-BS{}-{}".format(*shape)
        )
        for at, shape in enumerate(SHAPES)
    ],
)
def test_every_kernel_compiles_for_hopper(
    shape: tuple[int, int, int, torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from triton.runtime.jit import JITFunction

    calls: dict[Any, Call] = {}

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        form = (self.fn.__name__, tuple(arg is None for arg in args), str(sorted(kwargs.items())))
        calls.setdefault(form, (self, args, kwargs))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", note)
    calls_of_a_step(*shape)
    kernels = {
        "_plan", "_attend", "finish", "_add_prompt_scores", "_add_partial_sums", "_reset", "_select", "_move",
        "_compact_tables", "_clear", "_rescore", "_order", "_settle",
    }  # fmt: skip
    # FP8 is FlashAttention's alone, which returns its log-sum-exp.
    assert {name for name, *_ in calls} == kernels | (
        {"_prompt_lse"} if shape[3].itemsize > 1 else set()
    )
    for call in calls.values():
        assert compile_for_hopper(call).asm["cubin"]


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
