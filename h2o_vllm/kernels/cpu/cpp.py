# SPDX-License-Identifier: Apache-2.0
"""CPU kernels in C++ (``csrc/``), called through ctypes.

Runs in the worker. Imports torch and ctypes. Importing this module loads the library, the one that the wheel
carries or one built now; it raises OSError where neither can be had. The number of threads is OpenMP's, which
is torch's.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h2o_vllm.kernels.cpu import build
from h2o_vllm.kernels.cpu.batch import PagedBatch

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Call(ctypes.Structure):
    """``struct Call`` of ``csrc/batch.hpp``, field by field."""

    _pointers = ("query", "cache", "scores", "table", "lens", "starts", "rows", "out", "sinks",
                 "lane_rows", "lane_pages", "lane_counts", "lane_heavy")  # fmt: skip
    _strides = ("query_stride", "out_stride", "table_stride", "lane_stride")
    _numbers = ("count", "scored", "heads", "group", "size", "block", "dtype", "prompt")
    _fields_ = [
        *((name, c_void_p) for name in _pointers),
        *((name, c_int64) for name in _strides),
        *((name, c_int32) for name in _numbers),
        ("scale", c_float),
        ("softcap", c_float),
    ]


_library = build.load()
_library.h2o_isa.restype = ctypes.c_char_p
_attend = _library.h2o_attend
_attend.argtypes, _attend.restype = [c_void_p], None
_compact = _library.h2o_compact
_compact.argtypes = [c_void_p] * 3 + [c_int] * 2 + [c_void_p] * 2 + [c_int, c_int64] + [c_int] * 4
_compact.restype = None
_reset = _library.h2o_reset
_reset.argtypes = [c_void_p] * 2 + [c_int64, c_int, c_int64, c_int, c_int]
_reset.restype = None
_order = _library.h2o_order
_order.argtypes, _order.restype = [c_void_p] * 2 + [c_int64, c_int], None
_reduce, _weigh = _library.h2o_reduce, _library.h2o_weigh
_reduce.argtypes, _reduce.restype = [c_void_p] * 4 + [c_int] * 10, None
_weigh.argtypes, _weigh.restype = [c_void_p] * 4 + [c_int] * 11, None


def describe() -> str:
    """One line for the start-up log."""
    return f"C++ {_library.h2o_isa().decode()}, {_library.h2o_threads()} thread(s)"


def compact(
    kv_caches: Sequence[Tensor],
    scores: Tensor,
    heavy_blocks: Tensor,
    doomed_blocks: Tensor,
    owners: Tensor | None = None,
) -> Tensor | None:
    """See :func:`.reference.compact`."""
    heavy = heavy_blocks.numel()
    if heavy == 0 or doomed_blocks.numel() == 0:
        return None if owners is None else owners[:, :heavy]
    order = torch.cat([heavy_blocks, doomed_blocks]).to(torch.int32)
    layers, blocks, heads, block = scores.shape
    now = None
    if owners is not None:
        owners = owners.to(torch.int32).contiguous()
        now = torch.empty(layers, heavy, heads, dtype=torch.int32)
    first = kv_caches[0]
    _compact(
        _pointers(kv_caches), scores.data_ptr(), order.data_ptr(), heavy, order.numel(),
        *(None if given is None else given.data_ptr() for given in (owners, now)),
        layers, blocks, heads, first.shape[3] // 2, block, first.element_size(),
    )  # fmt: skip
    return now


def reset_scores(scores: Tensor, slots: Tensor) -> None:
    """See :func:`.reference.reset_scores`."""
    layers, blocks, heads, block = scores.shape
    slots = slots.contiguous()
    _reset(scores.data_ptr(), slots.data_ptr(), slots.numel(), layers, blocks, heads, block)


def order(scores: Tensor) -> Tensor:
    """See :func:`.reference.order`."""
    scores = scores.contiguous()
    out = torch.empty(scores.shape, dtype=torch.int64)
    count = scores.shape[-1]
    _order(scores.data_ptr(), out.data_ptr(), scores.numel() // max(1, count), count)
    return out


def reduce(
    kv_caches: Sequence[Tensor],
    blocks: Tensor,
    given: Tensor,
    *,
    values: bool,
    distances: bool,
    over_tokens: bool,
) -> Tensor:
    """See :meth:`.Tokens.reduce`; of ``blocks``, [m], int64."""
    _, heads, block, width = kv_caches[0].shape
    shape = (1, heads, width // 2) if over_tokens else (len(blocks), heads, block)
    out = torch.zeros(len(kv_caches), *shape)
    given = given.contiguous()
    _of_blocks(
        _reduce, kv_caches, blocks, given, out, given.shape[1], values, distances, over_tokens
    )
    return out.sqrt_() if distances else out


def weigh(
    kv_caches: Sequence[Tensor], blocks: Tensor, weights: Tensor, rotary: int, interleaved: bool
) -> Tensor:
    """:meth:`.Part.sums` of ``blocks``, [m], int64, without the constants.

    Args:
        weights: see :meth:`.Part.by_head`. rotary, interleaved: see :class:`.Rotation`.
    """
    layers, of, sources, count = weights.shape
    out = torch.zeros(layers, len(blocks), of, kv_caches[0].shape[2])
    weights = weights.contiguous()
    _of_blocks(_weigh, kv_caches, blocks, weights, out, of, sources, count, rotary, interleaved)
    return out


def _of_blocks(
    function: Any,
    kv_caches: Sequence[Tensor],
    blocks: Tensor,
    given: Tensor,
    out: Tensor,
    *more: int,
) -> None:
    _, heads, block, width = kv_caches[0].shape
    function(
        _pointers(kv_caches), blocks.data_ptr(), given.data_ptr(), out.data_ptr(), len(blocks),
        len(kv_caches), heads, width // 2, block, _DTYPES[kv_caches[0].dtype], *more,
    )  # fmt: skip


def _pointers(kv_caches: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(kv_caches))(*[cache.data_ptr() for cache in kv_caches])


def _run(
    batch: PagedBatch,
    starts: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
    scored: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    prompt: bool,
) -> None:
    count = rows.numel()
    if count == 0:
        return
    query, kv_cache, scores, block_table, seq_lens, lanes = batch
    _, heads, block, width = kv_cache.shape
    call = _Call(
        query.data_ptr(), kv_cache.data_ptr(), scores.data_ptr(), block_table.data_ptr(),
        seq_lens.data_ptr(), starts.data_ptr(), rows.data_ptr(), out.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        *([None] * 4 if lanes is None else [tensor.data_ptr() for tensor in lanes]),
        query.stride(0), out.stride(0), block_table.stride(0),
        0 if lanes is None else lanes.pages.stride(1),
        count, count if scored is None else scored, heads, query.shape[1] // heads, width // 2, block,
        _DTYPES[query.dtype], prompt, scale, softcap,
    )  # fmt: skip
    _attend(byref(call))


attend_decode = partial(_run, prompt=False)
"""See :func:`.reference.attend_decode`."""
attend_prompt = partial(_run, prompt=True)
"""See :func:`.reference.attend_prompt`."""
