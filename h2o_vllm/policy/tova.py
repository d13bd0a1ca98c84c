# SPDX-License-Identifier: Apache-2.0
"""TOVA, Token Omission Via Attention (Oren et al., EMNLP 2024)."""

from __future__ import annotations

from typing import ClassVar

from h2o_vllm.policy.h2o import H2OPolicy

__all__ = ["TOVAPolicy"]


class TOVAPolicy(H2OPolicy):
    """Keep the tokens that the newest query attends to most.

    TOVA (https://arxiv.org/abs/2401.06104) has no window and no memory: at each step the token with
    the lowest attention weight of the current query goes. Here it goes by blocks, so the query that
    decides is the last one before an eviction. The paper averages over all heads and keeps one set
    per layer; here each KV head keeps its own, as tensor-parallel ranks must not have to agree.
    ``kv_recent=0`` leaves out the window that the paper does not have. Each chunk of a prompt scores its last
    query: a bounded prompt is evicted from between chunks.
    """

    name: ClassVar[str] = "tova"
    last_query_only: ClassVar[bool] = True
