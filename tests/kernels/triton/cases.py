# SPDX-License-Identifier: Apache-2.0
"""Paged batches in the layouts of vLLM's CUDA backends: shuffled tables, NaN wherever nobody may look.

Those of CPUs are made of them, also where there is no Triton.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_vllm.kernels import reference
from h2o_vllm.kernels.batch import LayerBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAN = float("nan")


def shapes(*each: tuple[int | str, ...]) -> pytest.MarkDecorator:
    """Run a test with each (group, KV heads, head size, block size, layout) for :func:`make_batch`."""
    names = ("group", "kv_heads", "size", "block_size", "layout")
    found = [dict(zip(names, one, strict=True)) for one in each]
    ids = ["G{}-KH{}-D{}-BS{}-{}".format(*one) for one in each]
    return pytest.mark.parametrize("shape", found, ids=ids)


@dataclass
class Batch:
    """One layer's cache and the queries of some sequences, as the kernels get them."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scores: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    scale: float
    poisoned: Tensor  # [N, KH, BS], bool: slots no live token owns
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of an 8-bit query, key, value
    softcap: float = 0.0
    sinks: Tensor | None = None
    pinned: tuple[int, ...] = ()  # first tokens of each row whose scores nobody wants

    def out(self) -> Tensor:
        """An output that shows every element nobody wrote."""
        dtype = torch.bfloat16 if self.query.element_size() == 1 else self.query.dtype
        return torch.full(self.query.shape, NAN, dtype=dtype, device=self.query.device)

    def given(self, scores: Tensor, lanes: Any = None, layer: int = 0) -> LayerBatch:
        """As the kernels take it, with scales left out if they are 1."""
        device = self.query.device
        scales = [None if s == 1 else torch.tensor(s, device=device) for s in self.scales]
        return LayerBatch(
            self.query, self.key_cache, self.value_cache, scores, self.block_table, self.query_start_loc,
            self.seq_lens, self.scale, *scales, self.softcap, self.sinks, lanes, layer,
        )  # fmt: skip

    @property
    def flags(self) -> Tensor:
        """As the plan takes them."""
        from h2o_vllm.kernels.triton import PINNED

        flags = torch.zeros_like(self.seq_lens)
        if self.pinned:
            flags += PINNED * torch.tensor(self.pinned, dtype=torch.int32, device=flags.device)
        return flags

    @property
    def logit_scale(self) -> float:
        return self.scale * self.scales[0] * self.scales[1]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Live length and number of queries of each row."""
        queries = [end - start for start, end in pairwise(self.query_start_loc.tolist())]
        return list(zip(self.seq_lens.tolist(), queries, strict=True))


def empty_cache(
    blocks: int, kv_heads: int, block_size: int, size: int, dtype: torch.dtype, layout: str
) -> Tensor:
    """vLLM's logical [N, KH, BS, 2 * D], slots (NHD) or heads (HND) first in memory; all NaN."""
    if layout == "NHD":
        shape = (blocks, block_size, kv_heads, 2 * size)
        return torch.full(shape, NAN, dtype=dtype).transpose(1, 2)
    return torch.full((blocks, kv_heads, block_size, 2 * size), NAN, dtype=dtype)


def halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """K and V as [N, BS, KH, D], the way vLLM's FlashAttention backend takes them apart."""
    return kv_cache.transpose(1, 2).split(kv_cache.shape[3] // 2, dim=-1)


def make_batch(
    lengths: list[int],
    queries: list[int] | None = None,
    *,
    kv_heads: int = 2,
    group: int = 3,
    size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "NHD",
    strided: bool = False,
    spread: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
    query_dtype: torch.dtype | None = None,
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Batch:
    """Sequences of ``lengths`` tokens (0 = padding), the last ``queries[i]`` as queries (default 1 each)."""
    gen = torch.Generator().manual_seed(seed)
    queries = queries or [1] * len(lengths)
    needed = [-(-length // block_size) for length in lengths]
    blocks = sum(needed) + 4
    free = (torch.randperm(blocks - 1, generator=gen) + 1).int()
    # Behind a row's blocks lie stale ids, as in vLLM's persistent tables.
    width = max(needed) + 2
    table = torch.randint(0, blocks, (len(lengths), width), generator=gen, dtype=torch.int32)
    kv_cache = empty_cache(blocks, kv_heads, block_size, size, dtype, layout)
    keys, values = halves(kv_cache)
    scores = torch.full((blocks, kv_heads, block_size), NAN)
    poisoned = torch.ones(blocks, kv_heads, block_size, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        mine, free = free[:count], free[count:]
        table[row, :count] = mine
        slots = torch.arange(length)
        where = (mine.long()[slots // block_size], slots % block_size)
        keys[where] = torch.randn(length, kv_heads, size, generator=gen).to(dtype)
        values[where] = torch.randn(length, kv_heads, size, generator=gen).to(dtype)
        scores[where[0], :, where[1]] = torch.rand(length, kv_heads, generator=gen)
        poisoned[where[0], :, where[1]] = False
    tokens, heads = sum(queries), kv_heads * group
    dtype = query_dtype or dtype
    query = torch.randn(tokens, heads, size, generator=gen).mul(spread).to(dtype)
    if strided:  # as if split from one qkv projection
        wide = torch.full((tokens, (heads + 2 * kv_heads) * size), NAN, dtype=dtype)
        wide[:, : heads * size] = query.flatten(1)
        query = wide.to(device)[:, : heads * size].unflatten(1, (heads, size))
    on_device = kv_cache.to(device)
    assert on_device.stride() == kv_cache.stride()
    keys, values = halves(on_device)
    return Batch(
        query.to(device), keys, values, scores.to(device), table.to(device),
        torch.tensor([0, *queries]).cumsum(0).int().to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device), size**-0.5, poisoned.to(device), scales,
    )  # fmt: skip


def plain_torch(batch: Batch) -> tuple[Tensor, Tensor]:
    """Output and scores of all rows as torch computes them in the cache's dtype: the yardstick of error."""
    out, scores = batch.out(), batch.scores.clone()
    block_size, kv_heads = batch.key_cache.shape[1:3]
    group = batch.query.shape[1] // kv_heads
    starts = batch.query_start_loc.tolist()
    for row, (length, count) in enumerate(batch.lengths):
        if length == 0 or count == 0:
            continue
        tokens = slice(starts[row], starts[row] + count)
        slots = torch.arange(length, device=out.device)
        where = (batch.block_table[row, slots // block_size].long(), slots % block_size)
        key = batch.key_cache[where].to(out.dtype).transpose(0, 1).repeat_interleave(group, 0)
        value = batch.value_cache[where].to(out.dtype).transpose(0, 1).repeat_interleave(group, 0)
        query = batch.query[tokens].to(out.dtype).transpose(0, 1)
        logits = (query @ key.mT) * batch.logit_scale
        if batch.softcap:
            logits = batch.softcap * (logits / batch.softcap).tanh()
        future = torch.ones(count, length, dtype=torch.bool, device=out.device)
        logits = logits.masked_fill(future.triu(length - count + 1), float("-inf"))
        if batch.sinks is not None:
            aside = batch.sinks.to(logits.dtype)[:, None, None].expand(-1, count, 1)
            logits = torch.cat([logits, aside], -1)
        prob = logits.softmax(-1)[..., :length]
        out[tokens] = (prob @ value).transpose(0, 1) * batch.scales[2]
        given = prob.to(torch.promote_types(prob.dtype, torch.float32)).unflatten(0, (-1, group))
        old = scores[where[0], :, where[1]]
        scores[where[0], :, where[1]] = old + given.sum((1, 2)).T.float()
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


def exact(batch: Batch) -> tuple[Tensor, Tensor]:
    """Output and scores of the rows with one query, by the reference."""
    out, scores = batch.out(), batch.scores.clone()
    reference.attend_decode(batch.given(scores), out)
    return out, scores


def exact_prompt(batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of all rows, and the scores after the rows with several queries, by the reference."""
    given = batch.given(batch.scores.clone())
    lse = torch.full_like(batch.query[..., 0].T, torch.nan, dtype=torch.float32)
    for tokens, where in reference.live_rows(given):
        *_, sums = reference.attend_row(given, tokens, where)
        lse[:, tokens] = sums.flatten(1).T.float()
    reference.add_prompt_scores(given)
    return lse, given.scores


def lend(batch: Batch, owner: int, other: int, blocks: int) -> Batch:
    """The same, where a row begins in another's blocks, as those do that read one prefix."""
    table = batch.block_table.clone()
    table[other, :blocks] = table[owner, :blocks]
    return dataclasses.replace(batch, block_table=table)


def random_owners(layers: int, blocks: int, heads: int, gen: torch.Generator) -> Tensor:
    """[L, blocks, KH]: whose each lane is; the first head has most of them, and each at least one."""
    owners = torch.randint(0, 2 * heads, (layers, blocks * heads), generator=gen)
    owners = owners % (heads + 2) % heads
    for layer in owners:
        layer[torch.randperm(blocks * heads, generator=gen)[:heads]] = torch.arange(heads)
    return owners.view(layers, blocks, heads).int()


def on_pages(
    batch: Batch, pages_of: Callable[[int, int], tuple[list[int], int]], scores: Tensor
) -> Iterator[tuple[slice, Batch]]:
    """The batch as each KV head sees it, where heads share slots: rows of other lengths, on pages.

    Args:
        pages_of: of a head and a row the pages, in order, and how many tokens they hold.
        scores: [N, KH, BS].

    Yields:
        The q heads of a KV head, and a batch of that head alone, whose block ids are page ids. Its scores are
        ``scores``.
    """
    _, block_size, heads, _ = batch.key_cache.shape
    group, integers = batch.query.shape[1] // heads, batch.seq_lens
    keys, values = (
        cache.transpose(1, 2).flatten(0, 1).unsqueeze(2).contiguous()
        for cache in (batch.key_cache, batch.value_cache)
    )
    for head in range(heads):
        tables, lengths = zip(*[pages_of(head, row) for row in range(len(integers))], strict=True)
        width = max(map(len, tables))
        queries = slice(head * group, (head + 1) * group)
        yield (
            queries,
            dataclasses.replace(
                batch,
                query=batch.query[:, queries],
                key_cache=keys,
                value_cache=values,
                scores=scores.view(-1, 1, block_size),
                block_table=integers.new_tensor([one + [0] * (width - len(one)) for one in tables]),
                seq_lens=integers.new_tensor(lengths),
                poisoned=batch.poisoned.view(-1, 1, block_size),
                sinks=None if batch.sinks is None else batch.sinks[queries],
            ),
        )


def row_slots(batch: Batch, row: int) -> Tensor:
    """[N, KH, BS], bool: the live slots of one row."""
    mine = torch.zeros_like(batch.poisoned)
    block_size = batch.key_cache.shape[1]
    slots = torch.arange(int(batch.seq_lens[row]), device=mine.device)
    mine[batch.block_table[row, slots // block_size].long(), :, slots % block_size] = True
    return mine


def touched(batch: Batch, want: Tensor) -> Tensor:
    """[N, KH, BS], bool: slots whose score differs in ``want``."""
    return bits(want) != bits(batch.scores)


def bits(tensor: Tensor) -> Tensor:
    """Bit patterns, so that NaN equals itself."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
