# SPDX-License-Identifier: Apache-2.0
"""The policies H2O is compared with: keep everything, a window, or a random set."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from h2o_vllm.policy.base import BlockSplit, Policy
from h2o_vllm.policy.h2o import H2OPolicy

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FullPolicy", "RandomPolicy", "WindowPolicy"]


class FullPolicy(Policy):
    """Keep every token: stock vLLM."""

    name: ClassVar[str] = "full"
    scores_attention: ClassVar[bool] = False
    moves_tokens: ClassVar[bool] = False

    def split(
        self, candidates: list[int], num_doomed: int, *, first: bool, protected: int = 0
    ) -> BlockSplit:
        """Never called: a full budget has no excess."""
        del candidates, num_doomed, first, protected
        raise AssertionError("the full policy frees no blocks")


class WindowPolicy(Policy):
    """First blocks plus a sliding window (StreamingLLM, https://arxiv.org/abs/2309.17453).

    Whole blocks are dropped in place: nothing is scored, nothing is copied. The first blocks are those
    of the protected tokens, at least one.
    """

    name: ClassVar[str] = "window"
    scores_attention: ClassVar[bool] = False
    moves_tokens: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = False

    def split(
        self, candidates: list[int], num_doomed: int, *, first: bool, protected: int = 0
    ) -> BlockSplit:
        """Free the oldest blocks after the sequence's first ones, which go only if they must."""
        del first
        stay = max(1, protected)
        order = [i for i in candidates if i >= stay] + [i for i in candidates if i < stay]
        return BlockSplit((), tuple(sorted(order[:num_doomed])))


class RandomPolicy(H2OPolicy):
    """A random set per layer and KV head, plus the recent tokens: the floor to compare with.

    A token's rank is a hash of (layer, KV head, position), so a run can be repeated exactly and
    does not depend on what else is in the batch.
    """

    name: ClassVar[str] = "random"
    scores_attention: ClassVar[bool] = False
    moves_tokens: ClassVar[bool] = True

    def initial_scores(
        self, positions: Tensor, num_layers: int, num_kv_heads: int, first_kv_head: int
    ) -> Tensor | None:
        """Uniform in [0, 1), from the splitmix64 finaliser."""
        import torch

        layers = torch.arange(num_layers, dtype=torch.int64)[:, None, None]
        heads = torch.arange(first_kv_head, first_kv_head + num_kv_heads, dtype=torch.int64)
        mixed = (positions.cpu() * 1_000_003 + layers * 10_007 + heads[None, :, None]) * _GOLDEN
        for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
            mixed = (mixed ^ _logical_shift(mixed, shift)) * factor
        mixed = mixed ^ _logical_shift(mixed, 31)
        return (_logical_shift(mixed, 40).to(torch.float32) / float(1 << 24)).to(positions.device)


def _signed(value: int) -> int:
    """The int64 with the bits of ``value``: torch's integers are signed and wrap."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _logical_shift(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)
