# SPDX-License-Identifier: Apache-2.0
"""One tile of attention with scores, compiled by numba for :mod:`h2o_vllm.kernels.cpu.numba_kernels`.

Runs in the worker. Imports numba and numpy only. A *tile* is M query rows (tokens x the q heads of one
kv head) against the first S tokens of one sequence: logits of the whole tile are kept, so that one pass
over K and one over V give both the output and every token's share of attention.

Plain loops index with the bare loop variable, into slices: any arithmetic in an index makes numba add a
test for negative values, and LLVM then gives up on vectorising.
"""

from __future__ import annotations

import numpy as np

from h2o_vllm.kernels.cpu._numba_gemm import multiply_rows
from h2o_vllm.kernels.cpu._numba_vec import exp, jit, widen

__all__ = ["load_row", "tile"]


@jit
def load_row(source, target, factor):  # type: ignore[no-untyped-def]
    """``target[:] = source * factor`` in float32."""
    for i in range(target.shape[0]):
        target[i] = widen(source[i]) * factor


@jit
def _softmax(row, live):  # type: ignore[no-untyped-def]
    """exp(row - max) in place over the first ``live``, zeros behind; returns 1 / their sum."""
    top = row[0]
    for i in range(live):
        top = max(top, row[i])
    total = np.float32(0.0)
    for i in range(live):
        p = exp(row[i] - top)
        row[i] = p
        total += p
    for i in range(live, row.shape[0]):
        row[i] = np.float32(0.0)
    return np.float32(1.0) / total


@jit
def _add_scaled(source, factor, target):  # type: ignore[no-untyped-def]
    for i in range(target.shape[0]):
        target[i] += source[i] * factor


@jit
def _clear(target):  # type: ignore[no-untyped-def]
    for i in range(target.shape[0]):
        target[i] = np.float32(0.0)


@jit
def tile(  # type: ignore[no-untyped-def]
    query, limits, memory, table, page, stride, block_size, scratch, out,
    scores, score_page, score_stride,
):  # fmt: skip
    """Attention of M rows: adds their probabilities to ``scores``, leaves the output in ``out``.

    Args:
        query: [M, D], float32, scaled. limits: [M], ascending: how many tokens each row sees.
        memory: the layer's cache, flat. table: [MB], block ids. page, stride: words from the start
            of the cache to this head's page in block 0, and from one block to the next.
        scratch: flat float32, of at least M * (S rounded up to blocks).
        out: [M, D], float32, or [0, D] if the output is not wanted.
        scores: the layer's scores, flat. score_page, score_stride: as for ``memory``.
    """
    rows, size = query.shape
    length = limits[rows - 1]
    blocks = (length + block_size - 1) // block_size
    span = blocks * block_size
    flat_query, flat_out = query.reshape(-1), out.reshape(-1)
    first = 0
    for b in range(blocks):
        while limits[first] <= b * block_size:
            first += 1
        at = first * span + b * block_size
        for m in range(first, rows):
            o = m * span + b * block_size
            _clear(scratch[o : o + block_size])
        multiply_rows(
            flat_query, first * size, size, memory, page + np.int64(table[b]) * stride, block_size,
            scratch, at, span, size, rows - first, block_size,
        )  # fmt: skip
    inverse = np.empty(rows, np.float32)
    for m in range(rows):
        width = (limits[m] + block_size - 1) // block_size * block_size
        inverse[m] = _softmax(scratch[m * span : m * span + width], limits[m])
    _clear(flat_out)
    first = 0
    for b in range(blocks):
        # V behind the last token may be NaN, which a probability of zero would not silence.
        here = min(block_size, length - b * block_size)
        while limits[first] <= b * block_size:
            first += 1
        base = score_page + np.int64(table[b]) * score_stride
        for m in range(first, rows):
            o = m * span + b * block_size
            _add_scaled(scratch[o : o + here], inverse[m], scores[base : base + here])
        if out.shape[0] == 0:
            continue
        base = page + np.int64(table[b]) * stride + size * block_size
        multiply_rows(
            scratch, first * span + b * block_size, span, memory, base, size,
            flat_out, first * size, size, here, rows - first, size,
        )  # fmt: skip
    for m in range(out.shape[0]):
        for d in range(size):
            out[m, d] *= inverse[m]
