# SPDX-License-Identifier: Apache-2.0
"""Keys and values of what an eviction ranks first are read where they lie. Worker process; no vLLM."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o_vllm.kernels import cpu as kernels
from h2o_vllm.policy.fresh import Tokens


class PagedTokens(Tokens):
    """Tokens of blocks, [m], int64, in ``kv_caches``, of which only :attr:`both` makes copies."""

    def __init__(self, read: Any, kv_caches: Sequence[Tensor], blocks: Tensor) -> None:
        super().__init__(read)
        self.kv_caches, self.blocks = kv_caches, blocks

    def reduce(
        self,
        given: Tensor | None = None,
        *,
        values: bool = False,
        distances: bool = False,
        over_tokens: bool = False,
    ) -> Tensor:
        """As the base class."""
        if given is None:
            _, heads, block_size, width = self.kv_caches[0].shape
            shape = (len(self.blocks), heads, block_size) if over_tokens else (1, heads, width // 2)
            given = torch.full((len(self.kv_caches), *shape), 0.0 if distances else 1.0)
        return kernels.load().reduce(
            self.kv_caches,
            self.blocks,
            given,
            values=values,
            distances=distances,
            over_tokens=over_tokens,
        )
