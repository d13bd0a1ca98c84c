# SPDX-License-Identifier: Apache-2.0
"""CPU kernels compiled by numba: what runs where no C++ compiler does.

Runs in the worker. Imports torch, numpy and numba. Functions and meanings are those of
:mod:`h2o_vllm.kernels.reference`; each is compiled once per machine and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from h2o_vllm.kernels.cpu._numba_tiles import load_row, tile
from h2o_vllm.kernels.cpu._numba_vec import STAMP, entry, narrow

__all__ = ["attend_decode", "attend_prompt", "compact", "describe", "reset_scores", "score_prompt"]

# How each dtype reaches numba, which knows neither 16-bit float; see _numba_vec.
_WORDS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
_TYPES = {torch.float32: types.float32, torch.bfloat16: types.uint16, torch.float16: types.int16}
_TILE_WORDS = 1 << 17  # logits of one tile: half of a common L2 cache
_MAX_TILE_TOKENS = 64


def describe() -> str:
    """One line for the start-up log."""
    return f"numba {numba.__version__}, {torch.get_num_threads()} thread(s)"


def attend_decode(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """See :func:`h2o_vllm.kernels.reference.attend_decode`."""
    counts = torch.ones_like(tokens)
    _attend(query, kv_cache, scores, block_table, seq_lens, tokens, counts, rows, scale, out)


def score_prompt(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
) -> None:
    """See :func:`h2o_vllm.kernels.reference.score_prompt`."""
    attend_prompt(
        query, kv_cache, scores, block_table, seq_lens, query_start_loc, rows, scale, None
    )


def attend_prompt(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor | None,
) -> None:
    """See :func:`h2o_vllm.kernels.reference.attend_prompt`."""
    listed = rows.long()
    starts = query_start_loc[listed]
    counts = query_start_loc[listed + 1] - starts
    _attend(query, kv_cache, scores, block_table, seq_lens, starts, counts, rows, scale, out)


def compact(
    kv_caches: Sequence[Tensor], scores: Tensor, heavy_blocks: Tensor, doomed_blocks: Tensor
) -> None:
    """See :func:`h2o_vllm.kernels.reference.compact`."""
    if heavy_blocks.numel() == 0 or doomed_blocks.numel() == 0:
        return
    order = torch.cat([heavy_blocks, doomed_blocks]).to(torch.int64).numpy()
    heavy = heavy_blocks.numel()
    for kv_cache, layer_scores in zip(kv_caches, scores.numpy(), strict=True):
        pages = _words(kv_cache).reshape(*kv_cache.shape[:2], -1)
        _compact_layer(pages, layer_scores, order, heavy)


def reset_scores(scores: Tensor, slots: Tensor, values: Tensor | None = None) -> None:
    """See :func:`h2o_vllm.kernels.reference.reset_scores`."""
    if values is None:
        values = scores.new_zeros((1, 1, 1))
    _reset(scores.numpy(), slots.numpy(), values.numpy())


def _words(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.view(_WORDS[tensor.dtype]).numpy()


def _attend(
    query: Tensor,
    kv_cache: Tensor,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    counts: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor | None,
) -> None:
    if rows.numel() == 0:
        return
    _, heads, block_size, _ = kv_cache.shape
    group = query.shape[1] // heads
    threads = _threads(torch.get_num_threads())
    workers = min(threads, rows.numel() * heads)
    longest = -(-int(seq_lens[rows.long()].max()) // block_size) * block_size
    scratch = _scratch(workers, max(_TILE_WORDS, max(group, 8) * longest))
    run = _make_attend(kv_cache.dtype, threads > 1)
    words = _words(query)
    run(
        words,
        _words(kv_cache).reshape(-1),
        scores.numpy().reshape(-1),
        block_table.numpy(),
        seq_lens.numpy(),
        starts.numpy(),
        counts.numpy(),
        rows.numpy(),
        np.array([heads, block_size, workers, out is not None], np.int64),
        scale,
        words[:0] if out is None else _words(out),
        scratch,
    )


@cache
def _threads(available: int) -> int:
    """How many of torch's OpenMP threads, which vLLM has bound to cores, numba may use.

    When numba starts its threads it sets OpenMP's thread count for everybody; vLLM's attention stops if
    that changes under it, so it is set back. numba has as many threads as there were cores when it was
    imported.
    """
    threads = min(available, int(numba.config.NUMBA_NUM_THREADS))
    if threads > 1:
        numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
        numba.set_num_threads(threads)
        torch.set_num_threads(available)
    return threads


_kept: dict[str, np.ndarray[Any, Any]] = {}


def _scratch(workers: int, words: int) -> np.ndarray[Any, Any]:
    """[workers, >= words] float32, kept from call to call: fresh pages would be faulted in each time."""
    have = _kept.get("scratch")
    if have is None or have.shape[0] < workers or have.shape[1] < words:
        _kept["scratch"] = have = np.empty((workers, words), np.float32)
    return have


@cache
def _make_attend(dtype: torch.dtype, parallel: bool) -> Any:
    word = _TYPES[dtype]
    ints = types.Array(types.int32, 1, "A")
    signature = types.void(
        types.Array(word, 3, "A"),
        types.Array(word, 1, "C"),
        types.Array(types.float32, 1, "C"),
        types.Array(types.int32, 2, "A"),
        *[ints] * 4,
        types.Array(types.int64, 1, "C"),
        types.float64,
        types.Array(word, 3, "A"),
        types.Array(types.float32, 2, "C"),
    )

    # Captured, because what numba keeps on disk is told apart by closures: not by options or callees.
    variant = (STAMP, parallel)

    def attend(  # type: ignore[no-untyped-def]
        query, memory, scores, table, lens, starts, counts, rows, plan, scale, out, scratch
    ):
        heads, block_size, workers, wanted = plan[0], plan[1], plan[2], plan[3]
        assert variant[1] or workers == 1
        group, size = query.shape[1] // heads, query.shape[2]
        page = 2 * size * block_size
        for worker in numba.prange(workers):
            for task in range(worker, rows.shape[0] * heads, workers):
                r, head = task // heads, task % heads
                row, start, count = rows[r], starts[r], counts[r]
                length = np.int64(lens[row])
                if length <= 0 or count <= 0:  # padding
                    continue
                span = (length + block_size - 1) // block_size * block_size
                step = max(1, min(_MAX_TILE_TOKENS, scratch.shape[1] // (group * span)))
                wide = np.empty((min(step, count) * group, size), np.float32)
                result = np.empty((wide.shape[0] if wanted else 0, size), np.float32)
                limits = np.empty(wide.shape[0], np.int64)
                for t in range(0, count, step):
                    here = min(step, count - t) * group
                    for m in range(here):
                        token, h = start + t + m // group, head * group + m % group
                        load_row(query[token, h], wide[m], np.float32(scale))
                        limits[m] = length - count + t + m // group + 1
                    tile(
                        wide[:here], limits[:here], memory, table[row], head * page, heads * page,
                        block_size, scratch[worker], result[:here],
                        scores, head * block_size, heads * block_size,
                    )  # fmt: skip
                    for m in range(here if wanted else 0):
                        token, h = start + t + m // group, head * group + m % group
                        for d in range(size):
                            out[token, h, d] = narrow(result[m, d], out)

    return entry(attend, signature, parallel=parallel)


@entry
def _compact_layer(pages, scores, order, heavy):  # type: ignore[no-untyped-def]
    heads, block_size = scores.shape[1], scores.shape[2]
    size = pages.shape[2] // (2 * block_size)
    room, count = heavy * block_size, order.shape[0] * block_size
    rank = np.empty(count, np.float32)
    keep = np.empty(count, np.bool_)
    for head in range(heads):
        for c in range(count):
            value = scores[order[c // block_size], head, c % block_size]
            rank[c] = -np.inf if np.isnan(value) else value
        # The room-th highest value; of those equal to it the first few are kept.
        bar = np.partition(rank, count - room)[count - room]
        spare = room
        for c in range(count):
            keep[c] = rank[c] > bar
            spare -= keep[c]
        target = 0
        for c in range(count):
            if spare > 0 and rank[c] == bar:
                keep[c] = True
                spare -= 1
        for c in range(room, count):
            if not keep[c]:
                continue
            while keep[target]:
                target += 1
            to, at = order[target // block_size], target % block_size
            source, where = order[c // block_size], c % block_size
            for d in range(size):
                pages[to, head, d * block_size + at] = pages[source, head, d * block_size + where]
            to_value, from_value = (block_size + at) * size, (block_size + where) * size
            for d in range(size):
                pages[to, head, to_value + d] = pages[source, head, from_value + d]
            scores[to, head, at] = scores[source, head, where]
            target += 1


@entry
def _reset(scores, slots, values):  # type: ignore[no-untyped-def]
    layers, _, heads, block_size = scores.shape
    for layer in range(layers):
        for i in range(slots.shape[0]):
            if slots[i] < 0:
                continue
            block, offset = slots[i] // block_size, slots[i] % block_size
            for head in range(heads):
                value = np.float32(0.0)
                if values.shape[0] == layers and values.shape[2] == slots.shape[0]:
                    value = values[layer, head, i]
                scores[layer, block, head, offset] = value
