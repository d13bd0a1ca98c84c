# SPDX-License-Identifier: Apache-2.0
"""What numba lacks: 16-bit floats, a vectorisable exp, and a disk cache that notices changed callees.

Runs in the worker. Imports numba and numpy only. A word's meaning follows from the array that holds it:
float32 is itself, uint16 is bfloat16, int16 is float16 (numba computes with neither).
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

__all__ = ["STAMP", "entry", "exp", "jit", "narrow", "widen"]

# Without "nnan" and "ninf": NaN scores and empty slots must behave as written.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

_FLAGS: dict[str, Any] = {"fastmath": FASTMATH, "nogil": True, "error_model": "numpy"}


def jit(function: Any = None, **options: Any) -> Any:
    """``numba.njit`` with our flags, for what compiled code calls."""
    if function is None:
        return lambda f: jit(f, **options)
    return numba.njit(**_FLAGS, **options)(function)


def entry(function: Any, signature: Any = None, **options: Any) -> Any:
    """:func:`jit` for what Python calls: kept on disk where a directory can be written.

    numba looks at the file and the captured variables of this one function to see whether what it kept is
    still good. Code it calls must therefore not be kept by itself, and must show in :data:`STAMP`.
    """
    try:
        return numba.njit(signature, cache=True, **_FLAGS, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available": a read-only machine
        return numba.njit(signature, **_FLAGS, **options)(function)


STAMP = zlib.crc32(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("_numba_*.py")))
)
"""Changes with the code in the ``_numba_*`` files; to be captured by every entry that calls it."""


@intrinsic
def _as_float(context: Any, bits: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), code


@intrinsic
def _as_bits(context: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), code


@jit(inline="always")
def exp(x):  # type: ignore[no-untyped-def]
    """exp for x <= 0: 2^n * a degree-6 polynomial (Cephes expf), relative error below 3e-7."""
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    power = max(np.int32(n) + np.int32(127), np.int32(0))
    return y * _as_float(np.uint32(power) << np.uint32(23))


def widen(word: Any) -> Any:
    """One word of a query as float32."""
    raise NotImplementedError("compiled code only")


@overload(widen, inline="always")
def _widen(word):  # type: ignore[no-untyped-def]  # numba compares the two signatures, hints included
    if word == types.float32:
        return lambda word: word
    if word == types.uint16:
        return lambda word: _as_float(np.uint32(word) << np.uint32(16))

    def half(word):  # type: ignore[no-untyped-def]
        # Move the exponent into place, let a multiplication by 2^112 correct its bias.
        bits = np.uint32(np.uint16(word))
        low = _as_float((bits & np.uint32(0x7FFF)) << np.uint32(13))
        low = low * np.float32(5.192296858534828e33)
        return _as_float(_as_bits(low) | ((bits & np.uint32(0x8000)) << np.uint32(16)))

    return half


def narrow(value: Any, like: Any) -> Any:
    """float32 as a word of the array ``like``, to nearest even."""
    raise NotImplementedError("compiled code only")


@overload(narrow)
def _narrow(value, like):  # type: ignore[no-untyped-def]
    if like.dtype == types.float32:
        return lambda value, like: value

    def brain(value, like):  # type: ignore[no-untyped-def]
        bits = _as_bits(np.float32(value))
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    def half(value, like):  # type: ignore[no-untyped-def]
        bits = _as_bits(np.float32(value))
        sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
        bits = bits & np.uint32(0x7FFFFFFF)
        if bits >= np.uint32(0x477FF000):  # rounds past 65504, or is not finite
            bits = np.uint32(0x7E00) if bits > np.uint32(0x7F800000) else np.uint32(0x7C00)
        elif bits < np.uint32(0x38800000):  # subnormal: let a float addition round it
            bits = _as_bits(_as_float(bits) + np.float32(0.5)) - np.uint32(0x3F000000)
        else:
            odd = (bits >> np.uint32(13)) & np.uint32(1)
            bits = (bits + np.uint32(0xFFF) + odd - np.uint32(0x38000000)) >> np.uint32(13)
        return np.int16(np.uint16(sign | bits))

    return brain if like.dtype == types.uint16 else half
