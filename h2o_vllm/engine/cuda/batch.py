# SPDX-License-Identifier: Apache-2.0
"""What the metadata builder hands to the attention layers for a batch with budgets. Worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from h2o_vllm.engine.cuda.variants import Variant
    from h2o_vllm.kernels.triton import PromptSegments

__all__ = ["ScoredBatch"]


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
        decodes: whether scored rows with one query may be in it; the workspace knows which.
        prompt_rows: scored rows with several queries, [R], int32, or ``None``; never in a CUDA graph.
        prompts: their scored queries, or ``None``. maxima: those of rows whose scores are maxima.
        late: the late queries, of these, of rows that get to theirs in this step, or ``None``.
        max_query_len: no prompt row has more.
    """

    variant: Variant
    capturing: bool
    stock: Any | None
    num_tokens: int
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    decodes: bool
    prompt_rows: torch.Tensor | None
    prompts: PromptSegments | None
    maxima: PromptSegments | None
    late: PromptSegments | None
    max_query_len: int = 0
