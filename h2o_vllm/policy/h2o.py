# SPDX-License-Identifier: Apache-2.0
"""H2O, the Heavy-Hitter Oracle (Zhang et al., NeurIPS 2023, https://arxiv.org/abs/2306.14048)."""

from __future__ import annotations

from typing import ClassVar

from h2o_vllm.policy.base import BlockSplit, Policy

__all__ = ["H2OPolicy"]


class H2OPolicy(Policy):
    """Keep the tokens with the highest accumulated attention, plus the most recent ones.

    Score (paper, section 4; Algorithm 1): sum over all queries so far, prompt and generated, of
    the softmax probability the key received; summed over the query heads that share a KV head,
    never normalised. Each layer and KV head keeps its own set.
    """

    name: ClassVar[str] = "h2o"
    scores_attention: ClassVar[bool] = True
    moves_tokens: ClassVar[bool] = True

    def split(
        self, candidates: list[int], num_doomed: int, *, first: bool, protected: int = 0
    ) -> BlockSplit:
        """Free the oldest blocks at the first eviction, the youngest at every later one.

        The set of kept tokens is the same either way. At first the oldest blocks go because they
        are the prompt's published ones, which must not be written (they stay valid prefix-cache
        entries); later the youngest goes because it is the one with the fewest survivors to copy.
        """
        del protected
        if first:
            return BlockSplit(tuple(candidates[num_doomed:]), tuple(candidates[:num_doomed]))
        keep = len(candidates) - num_doomed
        return BlockSplit(tuple(candidates[:keep]), tuple(candidates[keep:]))
