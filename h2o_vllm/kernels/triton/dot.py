# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The matrix product of the kernels."""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["dot"]

# Triton 3.9's interpreter multiplies bfloat16 operands as if their bit patterns were numbers.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc):
    """``a @ b + acc`` as a tensor core does it: exact products, float32 sums; no tf32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
