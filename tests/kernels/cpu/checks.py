# SPDX-License-Identifier: Apache-2.0
"""What the kernels take for granted of each call: tests check theirs, serving checks none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from h2o_vllm.kernels.cpu.batch import Lanes, PagedBatch


class Checked:
    """An implementation of the kernels, each call of which is checked first."""

    def __init__(self, impl: ModuleType) -> None:
        self._impl = impl

    def __getattr__(self, name: str) -> Any:
        call, check = getattr(self._impl, name), _CHECKS.get(name)
        if check is None:
            return call

        def checked(*args: Any, **options: Any) -> Any:
            check(*args, **options)
            return call(*args, **options)

        return checked


def check_batch(
    batch: PagedBatch,
    rows: Tensor,
    out: Tensor | None = None,
    scored: int | None = None,
) -> None:
    """Check one call's tensors: shapes, dtypes, and that every index stays inside its tensor.

    Reads all of ``block_table``'s live part: for tests and debugging, not for every step.

    Raises:
        ValueError: naming what does not fit.
    """
    query, kv_cache, scores, block_table, seq_lens, _ = batch
    blocks, heads, block_size, width = kv_cache.shape
    for name, tensor in (("query", query), ("out", out)):
        if tensor is None:
            continue
        if tensor.dim() != 3 or tensor.shape[1] % heads or tensor.shape[2] * 2 != width:
            raise ValueError(f"{name} must be [T, H, {width // 2}], got {tuple(tensor.shape)}")
        if tensor.dtype != kv_cache.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, the cache {kv_cache.dtype}")
        if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
            raise ValueError(f"{name} must be contiguous in its last two axes")
    if tuple(scores.shape) != (blocks, heads, block_size) or scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32 [N, KH, BS], got {tuple(scores.shape)}")
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens), ("rows", rows)):
        if tensor.dtype != torch.int32 or (tensor.numel() and tensor.stride(-1) != 1):
            raise ValueError(f"{name} must be int32 and contiguous in its last axis")
    adding = rows.numel() if scored is None else scored
    if not 0 <= adding <= rows.numel():
        raise ValueError(f"scored must be 0 to {rows.numel()}, the listed rows; got {adding}")
    _check_rows(batch, rows)


def _check_rows(batch: PagedBatch, rows: Tensor) -> None:
    blocks, block_size = batch.kv_cache.shape[0], batch.kv_cache.shape[2]
    _, _, _, block_table, seq_lens, lanes = batch
    for row in rows.tolist():
        length = int(seq_lens[row])
        if length == 0:
            continue  # padding
        if not 0 < length <= block_table.shape[1] * block_size:
            raise ValueError(f"row {row}: length {length} does not fit its block table")
        table = block_table[row, : -(-length // block_size)]
        if not bool(((table > 0) & (table < blocks)).all()):
            raise ValueError(f"row {row}: block table has ids outside 1..{blocks - 1}")
        if lanes is not None and int(lanes.rows[row]) >= 0:
            _check_lanes(lanes, row, table)


def _check_lanes(lanes: Lanes, row: int, table: Tensor) -> None:
    """One row's: together its heads have every lane of its heavy blocks once, each of them at least one."""
    _, pages, counts, heavy = lanes
    at, heads = int(lanes.rows[row]), pages.shape[1]
    if at >= len(pages) or pages.dtype != torch.int32 or not pages.is_contiguous():
        raise ValueError(f"row {row}: lanes {at} of {tuple(pages.shape)}, {pages.dtype}")
    if not bool(((counts[at] > 0) & (counts[at] <= pages.shape[2])).all()):
        raise ValueError(
            f"row {row}: a head has none, or too many, of the lanes: {counts[at].tolist()}"
        )
    has = torch.cat([own[:count] for own, count in zip(pages[at], counts[at], strict=True)])
    first = table[: int(heavy[at])]
    every = (first[:, None] * heads + torch.arange(heads, dtype=torch.int32)).flatten()
    if len(first) != heavy[at] or not torch.equal(has.sort().values, every.sort().values):
        raise ValueError(
            f"row {row}: the heads' lanes are not those of its {int(heavy[at])} heavy blocks"
        )


def check_softmax(batch: PagedBatch, softcap: float, sinks: Tensor | None) -> None:
    """Check what changes a softmax: a soft cap is finite, and there is one sink for each q head.

    Raises:
        ValueError: naming what does not fit.
    """
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap must be 0 (none) or above, and finite; got {softcap}")
    if sinks is None:
        return
    heads = batch.query.shape[1]
    if tuple(sinks.shape) != (heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous():
        raise ValueError(
            f"sinks must be float32 [{heads}] and contiguous, got {sinks.dtype} {tuple(sinks.shape)}"
        )


def check_eviction(heavy_blocks: Tensor, doomed_blocks: Tensor, num_blocks: int) -> None:
    """Check one eviction: block ids in range, heavy ones listed once, none both heavy and doomed.

    Raises:
        ValueError: naming what does not fit.
    """
    heavy, doomed = heavy_blocks.tolist(), doomed_blocks.tolist()
    if any(not 0 < block < num_blocks for block in (*heavy, *doomed)):
        raise ValueError(f"block ids must lie in 1..{num_blocks - 1}")
    if len(set(heavy)) != len(heavy) or set(heavy) & set(doomed):
        raise ValueError("a heavy block is listed twice, or is doomed as well")


def check_owners(owners: Tensor, scores: Tensor, num_blocks: int) -> None:
    """Check the owners of an eviction's lanes: each is a head, and every head has one.

    Raises:
        ValueError: naming what does not fit.
    """
    layers, _, heads, _ = scores.shape
    wanted = (layers, num_blocks, heads)
    if tuple(owners.shape) != wanted:
        raise ValueError(f"owners must be {wanted}, got {tuple(owners.shape)}")
    for layer in owners:
        if sorted(set(layer.flatten().tolist())) != list(range(heads)):
            raise ValueError(f"owners must be all of the heads 0..{heads - 1}, in every layer")


def check_predicting(
    kv_caches: Sequence[Tensor], blocks: Tensor, weights: Tensor, rotary: int
) -> None:
    """Check blocks whose tokens are predicted, and the weights for it.

    Raises:
        ValueError: naming what does not fit.
    """
    num_blocks, heads, _, width = kv_caches[0].shape
    if blocks.dim() != 1 or not blocks.numel():
        raise ValueError(f"blocks must be [n], at least one, got {tuple(blocks.shape)}")
    check_eviction(blocks, blocks[:0], num_blocks)
    if rotary % 2 or not 0 <= rotary <= width // 2:
        raise ValueError(f"rotary must be even, in 0..{width // 2}, got {rotary}")
    own = width - rotary // 2
    most = max(heads, weights.shape[1])
    fits = [(len(kv_caches), heads, own + 1), (len(kv_caches), most, heads * own + 1)]
    if tuple(weights.shape) not in fits or weights.dtype != torch.float32:
        raise ValueError(
            f"weights must be float32, {fits[0]} or {fits[1]}, got {weights.dtype}, {tuple(weights.shape)}"
        )


def check_merging(first: Tensor, *others: Tensor) -> None:
    """Check scores of the same tokens by several ranks.

    Raises:
        ValueError: naming what does not fit.
    """
    for rank in (first, *others):
        if rank.shape != first.shape or rank.dtype != torch.float32 or not rank.dim():
            raise ValueError(
                f"ranks must be float32, of one shape [..., n], got {rank.dtype}, {tuple(rank.shape)} beside "
                f"{tuple(first.shape)}"
            )


def check_pages(pages: Tensor, kv_caches: Sequence[Tensor]) -> None:
    """Check pages of each head, of which a policy wants to know something.

    Raises:
        ValueError: naming what does not fit.
    """
    num_blocks, heads = kv_caches[0].shape[:2]
    if pages.dim() != 3 or tuple(pages.shape[:2]) != (len(kv_caches), heads):
        raise ValueError(f"pages must be [{len(kv_caches)}, {heads}, n], got {tuple(pages.shape)}")
    if not bool((pages < num_blocks * heads).all()):
        raise ValueError(f"page ids must lie in 0..{num_blocks * heads - 1}")
    padding = pages < 0
    if bool((padding[..., 1:] & ~padding[..., :-1]).any()) or bool(padding[..., -1].any()):
        raise ValueError("padding must come before pages, of which every head has one")


def _check_decode(
    batch: PagedBatch,
    starts: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor | None = None,
    scored: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    del starts, scale
    check_batch(batch, rows, out, scored)
    check_softmax(batch, softcap, sinks)


def _check_compact(
    kv_caches: Sequence[Tensor],
    scores: Tensor,
    heavy_blocks: Tensor,
    doomed_blocks: Tensor,
    owners: Tensor | None = None,
) -> None:
    del kv_caches
    check_eviction(heavy_blocks, doomed_blocks, scores.shape[1])
    if owners is not None:
        check_owners(owners, scores, heavy_blocks.numel() + doomed_blocks.numel())


_CHECKS: dict[str, Callable[..., None]] = {
    "attend_decode": _check_decode,
    "attend_prompt": _check_decode,
    "compact": _check_compact,
    "key_similarity": lambda kv_caches, pages: check_pages(pages, kv_caches),
    "merge_ranks": check_merging,
    "predict": lambda *given, **_: check_predicting(*given),
    "score_prompt": lambda batch, _starts, rows, _scale, softcap=0.0, sinks=None: _check_decode(
        batch, rows, rows, 1.0, None, None, softcap, sinks
    ),
    "value_distances": lambda kv_caches, pages: check_pages(pages, kv_caches),
}
