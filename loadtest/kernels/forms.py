# SPDX-License-Identifier: Apache-2.0
"""The forms in which our GPU kernels are launched: noted on CPU tensors, compiled without a GPU.

Triton compiles a kernel anew for other constants, types, alignments and options. :func:`launches` notes what
is launched, under the key that Triton's launcher would look it up by; :func:`compiled` does for one launch
what the launcher does when it finds nothing. Runs where Triton is installed, in any process.

Most of our launches name their form themselves (:mod:`h2o_vllm.kernels.triton.launching`). If one name
stands for two of these keys, a launch that is noted fails.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelParam, create_function_from_signature

from h2o_vllm.kernels.triton import (
    DecodeWorkspace,
    KVLayers,
    LaneTables,
    compact_tables,
    launching,
    warm_up,
)

_ANY_ARCH = 90
"""The key does not depend on it."""
_NAMED: dict[tuple[int, Hashable], Form] = {}
"""What our own names stand for, in all launches that this process has noted."""


@dataclass(frozen=True)
class Form:
    """What Triton's launcher looks a compiled kernel up by.

    Attributes:
        kernel: name of its function.
        arguments: type and specialisation of each argument; a constant's is its value.
        options: number of warps and stages.
    """

    kernel: str
    arguments: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """The first launch of a form, with what compiling it needs."""

    kernel: Any
    constants: dict[tuple[int], Any]
    signature: dict[str, str]
    alignments: dict[tuple[int], str]
    options: dict[str, Any]

    def constant(self, name: str) -> Any:
        """The value of a constant, and of an argument that is None or 1."""
        names = list(self.signature)
        return self.constants[(names.index(name),)]


@dataclass(frozen=True)
class Shape:
    """A model's attention on one rank: q heads per kv head, head size, block size, dtype of the cache."""

    group: int
    size: int
    block_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"G{self.group}-D{self.size}-BS{self.block_size}-{name}"


@contextmanager
def launches(*, run: bool) -> Iterator[dict[Form, Launch]]:
    """Note each form that is launched within.

    Args:
        run: whether the kernels run as well; only under Triton's interpreter.
    """
    noted: dict[Form, Launch] = {}
    through_triton = launching.through_triton

    def check_name(kernel: Any, grid: Any, name: Hashable, args: Any, constants: Any) -> None:
        if launching.aligned(args):
            form, _ = _form_of(kernel, args, dict(constants))
            known = _NAMED.setdefault((id(kernel), name), form)
            assert known == form, f"{name} names {known} and {form}"
        through_triton(kernel, grid, name, args, constants)

    def note_instead_of(original: Callable[..., Any]) -> Callable[..., Any]:
        def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            form, launch = _form_of(self, args, kwargs)
            noted.setdefault(form, launch)
            return original(self, *args, grid=grid, warmup=warmup, **kwargs) if run else None

        return note

    with (
        mock.patch.object(launching, "through_triton", check_name),
        mock.patch.object(JITFunction, "run", note_instead_of(JITFunction.run)),
        mock.patch.object(InterpretedFunction, "run", note_instead_of(InterpretedFunction.run)),
    ):
        yield noted


def _form_of(kernel: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Form, Launch]:
    binder, backend = _binder(kernel)
    bound, specialization, options = binder(*args, **kwargs)
    values = list(bound.values())
    shown, constants, alignments = [], {}, {}
    for at, (kind, special) in enumerate(specialization):
        if kind == "constexpr":
            constants[(at,)] = values[at]
            shown.append(repr(values[at]))
            continue
        if isinstance(special, str):
            alignments[(at,)] = backend.parse_attr(special)
        shown.append(f"{kind}:{special}")
    form = Form(
        kernel.fn.__name__,
        tuple(shown),
        tuple(f"{name}={value}" for name, value in sorted(options.items())),
    )
    signature = {name: kind for name, (kind, _) in zip(bound, specialization, strict=True)}
    return form, Launch(kernel, constants, signature, alignments, options)


@functools.cache
def _binder(kernel: Any) -> tuple[Any, Any]:
    """What the launcher makes of a kernel's arguments; an interpreted kernel has no launcher."""
    backend = make_backend(GPUTarget("cuda", _ANY_ARCH, 32))
    unspecialized = getattr(kernel, "kwargs", vars(kernel)).get("do_not_specialize") or ()
    signature = inspect.signature(kernel.fn)
    parameters = [
        KernelParam(at, parameter, parameter.name in unspecialized, False)
        for at, parameter in enumerate(signature.parameters.values())
    ]
    return create_function_from_signature(signature, parameters, backend), backend


def compiled(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel, with its PTX and machine code, for compute capability ``arch``."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.alignments)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)


def launch_everything(shape: Shape, device: str = "cpu") -> None:
    """Everything a worker warms up, without work; of CPU tensors only the types are looked at."""
    dtype, size, heads = shape.dtype, shape.size, 2 * shape.group
    kv = torch.zeros(4, shape.block_size, 2, 2 * size, dtype=dtype, device=device)
    keys, values = kv.split(size, dim=-1)
    scores = torch.zeros(2, 4, 2, shape.block_size, device=device)
    out_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    workspace = DecodeWorkspace(4, 64, heads, 2, out_dtype, size, device, sharing_layers=2)
    lanes = LaneTables.empty(2, 4, 2, 4, 4, device)
    query = torch.zeros(2, heads, size, dtype=dtype, device=device)
    scale = torch.ones((), device=device) if dtype.itemsize == 1 else None
    layers = KVLayers([keys, keys], [values, values])
    rows = torch.zeros(2, dtype=torch.int32, device=device)
    table = torch.zeros(2, 8, dtype=torch.int32, device=device)
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    compact_tables(table, rows, flags, shape.block_size, table.clone(), rows, rows, rows)
    # Neither, and as Gemma 2 and gpt-oss have them.
    for softcap, sinks in (
        (0.0, None),
        (50.0, None),
        (0.0, torch.ones(heads, dtype=out_dtype, device=device)),
    ):
        out, scales = query.to(out_dtype), (scale, scale, scale)
        warm_up(layers, scores, workspace, query, out, scales, softcap, sinks, lanes)
