# SPDX-License-Identifier: Apache-2.0
"""Launches kernels without Triton's look-up of the compiled form, which takes longer than the launch itself.

``kernel[grid](...)`` binds the arguments to their names, derives what to compile for from each of them, and
looks the result up by a long key: for 30 to 45 arguments 27 to 58 us of Python (Triton 3.7 and 3.9 on a 2.4
GHz EPYC), of which 4 to 5 us are the launch. Where attention runs eagerly, each layer launches up to four
kernels. A caller of :func:`launch` knows the form of a launch from a few values. The first launch of a form
goes through Triton, which returns the compiled kernel; the following ones call that.

What a compiled kernel is called by is in no documentation of Triton. ``CompiledKernel.__getitem__`` makes
the same call, with the same arguments, in 3.6 to 3.9; with other versions each launch goes through Triton. A
pointer may be given as a number in all of them. Triton's own hooks (``launch_enter_hook``, for its profiler
Proton) do not see these launches; CUDA's profilers do. ``H2O_TRITON_LAUNCHES=1`` leaves all launches to
Triton, and so does a start that finds ours wrong (:func:`leave_to_triton`). Worker process.
"""

import os
from collections.abc import Hashable, Mapping
from types import SimpleNamespace
from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

_VERSIONS = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Whose launchers have been read."""
_ALIGNED = 16
"""Bytes. Triton compiles another kernel for each tensor that is not aligned so."""


class _Bound:
    """A compiled kernel, for arguments of one form on one device."""

    __slots__ = ("_constants", "_device", "_function", "_metadata", "_run", "_tensors")

    def __init__(self, compiled: Any, args: tuple[Any, ...], constants: list[Any]) -> None:
        self._run, self._function = compiled.run, compiled.function
        self._metadata, self._constants = compiled.packed_metadata, constants
        self._tensors = [at for at, arg in enumerate(args) if isinstance(arg, Tensor)]
        self._device = driver.active.get_current_device()

    def __call__(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> bool:
        """Launch, on the current stream; ``False``, and nothing done, if the arguments have another form."""
        given = list(args)
        together = 0
        for at in self._tensors:
            given[at] = address = args[at].data_ptr()
            together |= address
        device = driver.active.get_current_device()
        if together % _ALIGNED or device != self._device:
            return False
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        self._run(
            x, y, z, stream, self._function, self._metadata, None, None, None, *given, *self._constants
        )  # fmt: skip
        return True


_bound: dict[tuple[int, Hashable], _Bound] = {}
_binding = SimpleNamespace(allowed=os.environ.get("H2O_TRITON_LAUNCHES") != "1")


def leave_to_triton() -> None:
    """Launch through Triton from now on."""
    _binding.allowed = False
    _bound.clear()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    form: Hashable,
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
) -> None:
    """``kernel[grid](*args, **constants)``; a CUDA graph may capture it.

    Args:
        kernel: a global ``triton.jit`` function, whose constants follow all of its other parameters.
        grid: one to three numbers.
        form: decides all that Triton compiles this kernel for, alignment of tensors and device aside: dtypes,
            which of ``args`` are ``None``, the constants, and those integers that are specialised. Integers
            have 32 bits. :mod:`loadtest.kernels.forms` checks it in each test that notes launches.
        args: of the other parameters, in order.
        constants: with Triton's options.
    """
    bound = _bound.get((id(kernel), form))
    if bound is None or not bound(grid, args):
        through_triton(kernel, grid, form, args, constants)


def through_triton(
    kernel: Any,
    grid: tuple[int, ...],
    form: Hashable,
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
) -> None:
    """Launch through Triton, and bind what it returns to the form."""
    compiled = kernel[grid](*args, **constants)
    # The interpreter compiles nothing.
    if not _binding.allowed or compiled is None or not triton.__version__.startswith(_VERSIONS):
        return
    if aligned(args):
        ordered = [constants[name] for name in kernel.arg_names[len(args) :]]
        _bound[id(kernel), form] = _Bound(compiled, args, ordered)


def aligned(args: tuple[Any, ...]) -> bool:
    """Whether all tensors among these are aligned as a bound kernel expects."""
    return not any(arg.data_ptr() % _ALIGNED for arg in args if isinstance(arg, Tensor))
