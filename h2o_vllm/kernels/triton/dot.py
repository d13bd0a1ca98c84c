# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The kernels' matrix product, soft caps of logits, and attention sinks."""

import os

import triton
import triton.language as tl

LOG2E = 1.4426950408889634

# Triton 3.9's interpreter multiplies the bit patterns of bfloat16 operands as integers.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc):
    """``a @ b + acc`` as on a tensor core: exact products, float32 sums, no tf32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def cap_of(softcap: float) -> float | None:
    """The argument of :func:`cap_logits`; ``None`` without a cap, which compiles a kernel of its own."""
    return softcap * LOG2E if softcap else None


@triton.jit
def cap_logits(logits, cap):
    """``cap * tanh(logits / cap)``, both in base 2; the logits themselves if ``cap`` is None."""
    if cap is not None:
        # If the exponential overflows, the result is the cap; if it underflows, its negative.
        logits = cap - 2 * cap / (tl.exp2(logits * (2.8853900817779268 / cap)) + 1)
    return logits


@triton.jit
def add_sinks(total, top, sinks, heads, real):
    """Sums of 2 ^ (logit - top) plus the terms of the sinks of ``heads``; the sums alone without sinks."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=real, other=float("-inf")).to(tl.float32)
        sink *= 1.4426950408889634
        # Limited to 2^120, where all probabilities are 0 in effect: an infinite sum could become NaN.
        total += tl.exp2(tl.minimum(sink - top, 120.0))
    return total
