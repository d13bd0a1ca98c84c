# SPDX-License-Identifier: Apache-2.0
"""Memory of the decode kernels, and the plan of a step: which rows decode, split into which pieces."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DecodeWorkspace"]


class DecodeWorkspace:
    """What :func:`.decode.attend_decode` needs beside its tensors; one per worker, shared by its layers.

    Fixed addresses and sizes, so CUDA graphs may hold it. The layers of a model run one after the other; two
    streams that decode at once need two.
    """

    def __init__(
        self,
        max_batch: int,
        max_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        head_size: int,
        device: torch.device | str,
    ) -> None:
        """Allocate.

        Args:
            max_batch: the largest number of rows B of any batch, padding included.
            max_tokens: N * BS of the pool: scored rows share no block, so never more are live. Rows that
                do not fit are attended, but their probabilities are dropped.
            num_heads: H of this rank. num_kv_heads: KH of this rank.
            dtype: of query and output. head_size: D.
        """
        self.max_batch = max_batch
        self.max_tokens = max_tokens
        self.seq_lens = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        del num_heads, num_kv_heads, dtype, head_size

    def plan(self, query_start_loc: Tensor, seq_lens: Tensor) -> None:
        """Split this step's rows among the GPU's processors. Once per step, before its first layer.

        Eager, not in the graph; one launch; no synchronisation.

        Args:
            query_start_loc: [B + 1], int32. seq_lens: [B], int32: live lengths of the rows to attend here;
                0 = not ours, or padding. Rows with another number of queries than one are left out as well.
        """
        rows = seq_lens.shape[0]
        self.seq_lens.zero_()
        self.seq_lens[:rows] = seq_lens
        self.query_start_loc[: rows + 1] = query_start_loc
