# SPDX-License-Identifier: Apache-2.0
"""Metadata that the builder passes to the attention layers for a batch with budgets. Worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from h2o_vllm.engine.cuda.variants import Variant
    from h2o_vllm.kernels.triton import LaneTables, PromptSegments


@dataclass(frozen=True)
class SharedPrompts:
    """Rows with several queries whose KV heads share slots. Our kernels attend them, scored or not.

    Attributes:
        rows: [R], int32. max_query_len: the most queries of any of them.
        scored: their scored queries, or ``None`` if there are none.
    """

    rows: torch.Tensor
    max_query_len: int
    scored: PromptSegments | None


@dataclass(frozen=True)
class ScoredBatch:
    """A batch with block tables without holes. The builder owns the tensors: they never move.

    "Our rows" are those that our kernels attend; vLLM's kernels attend all others.

    Attributes:
        variant: the kernels that serve the batch.
        capturing: whether a CUDA graph is being captured.
        stock: vLLM's own metadata of the batch, with length 0 for our rows; ``None`` if all rows are ours.
        num_tokens: tokens without padding.
        block_table: [B, MB], int32. query_start_loc: [B + 1], int32. seq_lens: [B], int32, live lengths.
        decodes: whether our rows with one query may be in the batch. The workspace's plan lists them.
        cut: whether the plan may cut any of them into pieces.
        prompt_rows: scored rows with several queries that vLLM attends, [R], int32, or ``None``. Never in a
            CUDA graph. max_query_len: the most queries of any of them. prompts: their scored queries, or
            ``None``.
        lanes: the lanes of rows whose KV heads share slots; ``None``: no row's heads do.
        shared_prompts: the rows with several queries whose heads share slots, or ``None``.
    """

    variant: Variant
    capturing: bool
    stock: Any | None
    num_tokens: int
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    decodes: bool
    cut: bool = True
    prompt_rows: torch.Tensor | None = None
    max_query_len: int = 0
    prompts: PromptSegments | None = None
    lanes: LaneTables | None = None
    shared_prompts: SharedPrompts | None = None
