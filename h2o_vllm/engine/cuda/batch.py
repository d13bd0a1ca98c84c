# SPDX-License-Identifier: Apache-2.0
"""What the metadata builder hands to the attention layers for a batch with budgets. Worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from h2o_vllm.engine.cuda.variants import Variant
    from h2o_vllm.kernels.triton import LaneTables, PromptSegments

__all__ = ["ScoredBatch", "ScoredPrompts", "SharedPrompts"]


@dataclass(frozen=True)
class ScoredPrompts:
    """The scored queries of rows with several.

    Attributes:
        every: of all rows, or ``None``.
        late: the late queries, of these, of rows that get to theirs in this step, or ``None``.
    """

    every: PromptSegments | None = None
    late: PromptSegments | None = None


@dataclass(frozen=True)
class SharedPrompts:
    """Rows with several queries whose KV heads share slots; ours, scored or not.

    Attributes:
        rows: [R], int32. max_query_len: none has more queries.
        scored: those of their queries that are.
    """

    rows: torch.Tensor
    max_query_len: int
    scored: ScoredPrompts


@dataclass(frozen=True)
class ScoredBatch:
    """A batch without holes. The tensors are the builder's own: same addresses in every step.

    Attributes:
        variant: which kernels serve it.
        capturing: whether a CUDA graph is being captured.
        stock: vLLM's own metadata of the batch, in which rows that are ours have length 0; ``None``
            if every row is ours.
        num_tokens: without padding.
        block_table: [B, MB], int32. query_start_loc: [B + 1], int32. seq_lens: [B], int32, live lengths.
        decodes: whether rows with one query that are ours may be in it; the workspace knows which.
        prompt_rows: scored rows with several queries that vLLM attends, [R], int32, or ``None``; never in a
            CUDA graph. max_query_len: none has more. prompts: their scored queries.
        lanes: whose heads share slots; ``None``: nobody's in this batch.
        shared_prompts: rows of these with several queries, or ``None``.
    """

    variant: Variant
    capturing: bool
    stock: Any | None
    num_tokens: int
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    decodes: bool
    prompt_rows: torch.Tensor | None = None
    max_query_len: int = 0
    prompts: ScoredPrompts = ScoredPrompts()
    lanes: LaneTables | None = None
    shared_prompts: SharedPrompts | None = None
