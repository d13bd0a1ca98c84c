# SPDX-License-Identifier: Apache-2.0
"""Repeat: what the model has to look at to say the prompt again (Kim et al., KVzip, NeurIPS 2025)."""

from __future__ import annotations

from typing import ClassVar

from h2o_vllm.policy.h2o import H2OPolicy

__all__ = ["RepeatPolicy"]


class RepeatPolicy(H2OPolicy):
    """Keep the tokens that the model attends to when it is made to repeat the prompt.

    KVzip (https://arxiv.org/abs/2505.23416): behind the prompt the model reads "Repeat the previous context
    exactly." and the prompt again, and a token's score is the largest attention that any of these queries, of
    any query head of its KV head, gives it. What copying needs stays: also facts that nobody has asked for
    yet. The price is about another prefill.

    Beyond the paper, so that evictions can go on while tokens are generated: their queries raise the scores
    too, by the same maximum. KVzip ranks the tokens of all heads and layers together; here each KV head keeps
    its own set.
    """

    name: ClassVar[str] = "repeat"
    repeats_prompt: ClassVar[bool] = True
