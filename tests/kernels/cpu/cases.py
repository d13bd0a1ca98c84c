# SPDX-License-Identifier: Apache-2.0
"""Small paged batches for the tests of CPU kernels, and what these must do with them."""

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_vllm.kernels.cpu import reference
from h2o_vllm.kernels.cpu.batch import Lanes, PagedBatch, key_value_views
from tests.kernels.triton import cases


@dataclass
class Batch(cases.Batch):
    """The same in the memory of one layer on CPUs, of which ``key_cache`` and ``value_cache`` are views."""

    kv_cache: Tensor = field(kw_only=True)

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

    def used_scores(self, scores: Tensor) -> Tensor:
        return scores[~self.poisoned]


def make_batch(
    lengths: list[int], queries: list[int] | None = None, *, block_size: int = 32, **options: Any
) -> Batch:
    """As :func:`.cases.make_batch`."""
    made = cases.make_batch(lengths, queries, block_size=block_size, **options)
    blocks, _, heads, size = made.key_cache.shape
    kv_cache = torch.empty(blocks, heads, block_size, 2 * size, dtype=made.key_cache.dtype)
    keys, values = key_value_views(kv_cache)
    key_cache, value_cache = keys.permute(0, 3, 1, 2), values.transpose(1, 2)
    key_cache.copy_(made.key_cache)
    value_cache.copy_(made.value_cache)
    views = {"key_cache": key_cache, "value_cache": value_cache, "kv_cache": kv_cache}
    return Batch(**{**vars(made), **views})


def by_torch(batch: Batch, lanes: Lanes | None = None) -> tuple[Tensor, Tensor]:
    """As :func:`.cases.plain_torch`, where heads of some rows may share slots."""
    if lanes is None:
        return cases.plain_torch(batch)
    out, scores = batch.out(), batch.scores.clone()
    _, heads, block_size = scores.shape

    def pages(head: int, row: int) -> tuple[list[int], int]:
        length, place = int(batch.seq_lens[row]), int(lanes.rows[row])
        mine = batch.block_table[row, : -(-length // block_size)] * heads + head
        if place < 0:
            return mine.tolist(), length
        count, heavy = int(lanes.counts[place, head]), int(lanes.heavy[place])
        listed = lanes.pages[place, head, :count]
        return [*listed.tolist(), *mine[heavy:].tolist()], length + (count - heavy) * block_size

    for queries, alone in cases.on_pages(batch, pages, scores):
        out[:, queries], found = cases.plain_torch(alone)
        alone.scores.copy_(found)
    return out, scores


def attend(
    impl: ModuleType, batch: Batch, scored: int | None = None, lanes: Lanes | None = None
) -> tuple[Tensor, Tensor]:
    """Output and scores; of decodes where each row has one query."""
    out, scores = batch.out(), batch.scores.clone()
    decodes = len(batch.query) == len(batch.rows)
    starts = batch.rows if decodes else batch.query_start_loc
    call = impl.attend_decode if decodes else impl.attend_prompt
    paged = batch.paged(scores)._replace(lanes=lanes)
    call(paged, starts, batch.rows, batch.scale, out, scored, **batch.softmax)
    return out, scores


def check_attention(
    impl: ModuleType, batch: Batch, scored: int | None = None, lanes: Lanes | None = None
) -> None:
    """Output and scores equal the reference's. Only the first ``scored`` rows may change their scores; by
    default all."""
    out, scores = attend(impl, batch, scored, lanes)
    exact, exact_scores = batch.out(), batch.scores.clone()
    paged = batch.paged(exact_scores)._replace(lanes=lanes)
    arguments = (batch.query_start_loc, batch.rows, batch.scale, exact)
    reference.attend_prompt(paged, *arguments, **batch.softmax)
    plain, plain_scores = by_torch(batch, lanes)
    for row in batch.rows.tolist()[len(batch.rows) if scored is None else scored :]:
        mine = batch.block_table[row, : -(-int(batch.seq_lens[row]) // batch.kv_cache.shape[2])]
        assert torch.equal(scores[mine].nan_to_num(-1), batch.scores[mine].nan_to_num(-1))
        exact_scores[mine] = plain_scores[mine] = batch.scores[mine]
    # Storing the exact value in this dtype rounds it: the tolerance allows that much.
    cases.assert_no_worse(out, exact, plain, 4e-6 if out.dtype == torch.float32 else 1e-3)
    used = (batch.used_scores(one) for one in (scores, exact_scores, plain_scores))
    cases.assert_no_worse(*used, 2e-5)
    assert scores[batch.poisoned].isnan().all()


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
