# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Scores that are maxima in place of sums, of rows that may share blocks: prompts that are repeated.

Where a sum has one writer, a maximum may have several at once: a reader of a prompt beside its owner, the
segments of one row. A float that is not negative has the bits of an integer that grows with it, so an integer
maximum in the L2 cache settles it. In any order the same comes out, to the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["raise_scores"]


@triton.jit
def raise_scores(target, old, new, live):
    """Raise the scores at ``target``, where ``old`` has been read, to ``new``; both are not negative.

    ``old`` may have been raised since, never lowered: what is no more than it needs no write. Maxima seldom
    rise, so that mostly nothing is moved but the reading.
    """
    at = target.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(at, new.to(tl.int32, bitcast=True), mask=live & (new > old), sem="relaxed")
