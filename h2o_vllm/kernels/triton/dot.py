# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The matrix product of the kernels, and what may become of logits before their softmax."""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["add_sinks", "cap_logits", "cap_of", "dot"]

_LOG2E = 1.4426950408889634

# Triton 3.9's interpreter multiplies bfloat16 operands as if their bit patterns were numbers.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def dot(a, b, acc):
    """``a @ b + acc`` as a tensor core does it: exact products, float32 sums; no tf32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def cap_of(softcap: float) -> float | None:
    """What :func:`cap_logits` takes for a cap on logits; another form of a kernel where there is none."""
    return softcap * _LOG2E if softcap else None


@triton.jit
def cap_logits(logits, cap):
    """``cap * tanh(logits / cap)``, both in base 2; as they are where ``cap`` is None."""
    if cap is not None:
        # An exponential that overflows leaves the cap, one that underflows its negative.
        logits = cap - 2 * cap / (tl.exp2(logits * (2.8853900817779268 / cap)) + 1)
    return logits


@triton.jit
def add_sinks(total, top, sinks, heads, real):
    """Sums of 2 ^ (logit - top) and what the sinks of their ``heads`` add; as they are without sinks."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=real, other=float("-inf")).to(tl.float32)
        sink *= 1.4426950408889634
        # Beyond 2^120 every probability is as good as 0; an infinite sum could become NaN.
        total += tl.exp2(tl.minimum(sink - top, 120.0))
    return total
