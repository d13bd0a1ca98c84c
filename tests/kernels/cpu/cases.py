# SPDX-License-Identifier: Apache-2.0
"""Small paged batches for the kernel tests: shuffled block tables, NaN wherever nobody may look."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_vllm.kernels.cpu import reference
from h2o_vllm.kernels.cpu.batch import PagedBatch, key_value_views


@dataclass
class Batch:
    """One layer's cache and the queries of some sequences, as the kernels get them."""

    query: Tensor
    kv_cache: Tensor
    scores: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float
    poisoned: Tensor  # [N, KH, BS], bool: slots no live token owns
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def softmax(self) -> dict[str, Any]:
        """What changes the softmax, as the kernels take it."""
        return {"softcap": self.softcap, "sinks": self.sinks}

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.seq_lens), dtype=torch.int32)

    def paged(self, scores: Tensor | None = None) -> PagedBatch:
        """What the kernels take, with other scores if given."""
        scores = self.scores if scores is None else scores
        return PagedBatch(self.query, self.kv_cache, scores, self.block_table, self.seq_lens)

    def out(self) -> Tensor:
        """An output that shows every element nobody wrote."""
        return torch.full_like(self.query, float("nan"), memory_format=torch.contiguous_format)

    def used_scores(self, scores: Tensor) -> Tensor:
        return scores[~self.poisoned]


def make_batch(
    lengths: list[int],
    queries: list[int] | None = None,
    *,
    kv_heads: int = 2,
    group: int = 3,
    size: int = 64,
    block_size: int = 32,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    spread: float = 1.0,
    seed: int = 0,
) -> Batch:
    """Random sequences of ``lengths`` tokens, the last ``queries[i]`` of them as queries (default 1 each)."""
    gen = torch.Generator().manual_seed(seed)
    queries = queries or [1] * len(lengths)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + 4
    free = (torch.randperm(blocks - 1, generator=gen) + 1).int()
    table = torch.zeros(len(lengths), max(needed) + 2, dtype=torch.int32)
    kv_cache = torch.full((blocks, kv_heads, block_size, 2 * size), float("nan"), dtype=dtype)
    scores = torch.full((blocks, kv_heads, block_size), float("nan"))
    poisoned = torch.ones(blocks, kv_heads, block_size, dtype=torch.bool)
    keys, values = key_value_views(kv_cache)
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        mine, free = free[:count], free[count:]
        table[row, :count] = mine
        for i, block in enumerate(mine.tolist()):
            live = min(block_size, length - i * block_size)
            shape = (kv_heads, live, size)
            keys[block, :, :, :live] = torch.randn(shape, generator=gen).mT.to(dtype)
            values[block, :, :live] = torch.randn(shape, generator=gen).to(dtype)
            scores[block, :, :live] = torch.rand(shape[:2], generator=gen)
            poisoned[block, :, :live] = False
    tokens, heads = sum(queries), kv_heads * group
    query = torch.randn(tokens, heads, size, generator=gen).mul(spread).to(dtype)
    if strided:  # as if split from one qkv projection
        wide = torch.full((tokens, (heads + 2 * kv_heads) * size), float("nan"), dtype=dtype)
        wide[:, : heads * size] = query.flatten(1)
        query = wide[:, : heads * size].unflatten(1, (heads, size))
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return Batch(
        query, kv_cache, scores, table, torch.tensor(lengths, dtype=torch.int32), starts,
        size**-0.5, poisoned,
    )  # fmt: skip


def plain_torch(batch: Batch) -> tuple[Tensor, Tensor]:
    """Output and scores as plain torch computes them in the cache's own dtype: the yardstick of error."""
    exact = key_value_views(batch.kv_cache)
    out, scores = batch.out(), batch.scores.clone()
    block_size = batch.kv_cache.shape[2]
    for row, length in enumerate(batch.seq_lens.tolist()):
        start, end = batch.query_start_loc[row : row + 2].tolist()
        blocks = batch.block_table[row, : -(-length // block_size)].long()
        key = exact[0][blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :length]
        value = exact[1][blocks].transpose(0, 1).flatten(1, 2)[:, :length]
        group = batch.query.shape[1] // key.shape[0]
        query = batch.query[start:end].transpose(0, 1)
        logits = (query @ key.repeat_interleave(group, 0).mT) * batch.scale
        if batch.softcap:
            logits = batch.softcap * (logits / batch.softcap).tanh()
        future = torch.ones(end - start, length, dtype=torch.bool).triu(length - (end - start) + 1)
        logits = logits.masked_fill(future, float("-inf"))
        if batch.sinks is not None:
            sinks = batch.sinks.to(logits.dtype)[:, None, None].expand(-1, end - start, 1)
            logits = torch.cat([logits, sinks], -1)
        prob = logits.softmax(-1)[..., :length]
        out[start:end] = (prob @ value.repeat_interleave(group, 0)).transpose(0, 1)
        slots = torch.arange(length)
        where = (blocks[slots // block_size], slice(None), slots % block_size)
        scores[where] += prob.float().unflatten(0, (-1, group)).sum((1, 2)).T
    return out, scores


def assert_no_worse(got: Tensor, exact: Tensor, plain: Tensor, floor: float) -> None:
    """The error must be at most twice what plain torch's is in this dtype, or below ``floor``.

    ``floor`` is a share of the largest exact value (or of 1): float32 sums in another order differ.
    """
    assert not got.isnan().any()
    error = (got.double() - exact.double()).abs().max().item()
    floor *= max(1.0, exact.abs().max().item())
    allowed = max(2 * (plain.double() - exact.double()).abs().max().item(), floor)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def check(batch: Batch, out: Tensor | None, scores: Tensor, scored: int | None = None) -> None:
    """Output and scores against the reference. Only the first ``scored`` rows may have changed their scores;
    by default all."""
    exact, exact_scores = batch.out(), batch.scores.clone()
    arguments = (batch.query_start_loc, batch.rows, batch.scale, exact)
    reference.attend_prompt(batch.paged(exact_scores), *arguments, **batch.softmax)
    plain, plain_scores = plain_torch(batch)
    for row in batch.rows.tolist()[len(batch.rows) if scored is None else scored :]:
        mine = batch.block_table[row, : -(-int(batch.seq_lens[row]) // batch.kv_cache.shape[2])]
        assert torch.equal(scores[mine].nan_to_num(-1), batch.scores[mine].nan_to_num(-1))
        exact_scores[mine] = plain_scores[mine] = batch.scores[mine]
    if out is not None:
        # What the exact value loses by being stored in this dtype is nobody's fault.
        assert_no_worse(out, exact, plain, 4e-6 if out.dtype == torch.float32 else 1e-3)
    assert_no_worse(
        batch.used_scores(scores), batch.used_scores(exact_scores),
        batch.used_scores(plain_scores), 2e-5,
    )  # fmt: skip
    assert torch.equal(
        scores[batch.poisoned].isnan(), torch.ones_like(scores[batch.poisoned], dtype=torch.bool)
    )


def check_decode(impl: ModuleType, batch: Batch, scored: int | None = None) -> None:
    """Attention of one query per row; see :func:`check`."""
    out, scores = batch.out(), batch.scores.clone()
    arguments = (batch.rows, batch.rows, batch.scale, out, scored)
    impl.attend_decode(batch.paged(scores), *arguments, **batch.softmax)
    check(batch, out, scores, scored)


def check_prompt(impl: ModuleType, batch: Batch, scored: int | None = None) -> None:
    """Attention of several queries per row, and if all are scored their scores alone; see :func:`check`."""
    out, scores = batch.out(), batch.scores.clone()
    arguments = (batch.query_start_loc, batch.rows, batch.scale)
    impl.attend_prompt(batch.paged(scores), *arguments, out, scored, **batch.softmax)
    check(batch, out, scores, scored)
    if scored is None:
        scores = batch.scores.clone()
        impl.score_prompt(batch.paged(scores), *arguments, **batch.softmax)
        check(batch, None, scores)


def attended_by_vllm(batch: Batch) -> Tensor:
    """What vLLM's own CPU kernel answers, over a cache that vLLM's own writer has written anew."""
    vllm = pytest.importorskip("vllm")
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip(f"needs vLLM's CPU build, found {vllm.__version__}")
    current_platform.import_kernels()
    blocks, heads, block_size, width = batch.kv_cache.shape
    size = width // 2
    isa = "vec16" if size % 32 or block_size % 32 else "vec"
    # Through vLLM's own writer, so that a change of its layout shows here.
    keys, values = (view.clone() for view in key_value_views(batch.kv_cache))
    batch.kv_cache.zero_()
    pages = batch.kv_cache.view(blocks, heads, 2 * block_size, size).chunk(2, dim=2)
    slots = torch.arange(blocks * block_size)
    ops.cpu_attn_reshape_and_cache(
        keys.nan_to_num().permute(0, 3, 1, 2).flatten(0, 1).contiguous(),
        values.nan_to_num().transpose(1, 2).flatten(0, 1).contiguous(),
        *pages, slots, isa,
    )  # fmt: skip
    theirs = batch.out()
    common = {"query_start_loc": batch.query_start_loc, "seq_lens": batch.seq_lens, "causal": True}
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(batch.seq_lens), num_heads=batch.query.shape[1], num_kv_heads=heads,
        head_dim=size, dtype=batch.query.dtype, sliding_window_size=-1, isa=isa,
        enable_kv_split=True, **common,
    )  # fmt: skip
    ops.cpu_attention_with_kv_cache(
        query=batch.query, key_cache=pages[0], value_cache=pages[1], output=theirs,
        scale=batch.scale, alibi_slopes=None, sliding_window=-1, block_table=batch.block_table,
        softcap=batch.softcap, scheduler_metadata=plan, s_aux=batch.sinks, **common,
    )  # fmt: skip
    return theirs
