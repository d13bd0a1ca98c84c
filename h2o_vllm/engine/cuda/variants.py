# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve a batch, and so which CUDA graph is replayed for it. Worker process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from h2o_vllm.kernels.triton import EVICTING, SCORED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from h2o_vllm.config.options import H2OConfig
    from h2o_vllm.engine.worker.rows import StepRows
    from h2o_vllm.policy.policy import Policy

__all__ = ["StepVariant", "Variant", "row_flags", "variant_of", "variants_for", "variants_of"]


class Variant(Enum):
    """Which kernels serve a batch.

    A replayed CUDA graph cannot branch on its batch, so a variant is captured on its own and the step picks
    one: a batch without budgets then launches exactly what stock vLLM launches.

    Some are captured, see :func:`variants_for`; ``SCORED`` and ``HOLES`` only save time: where one is not,
    its batches are served as ``MIXED``.
    """

    STOCK = "stock"
    """vLLM's attention alone: nobody in the batch evicts."""
    MIXED = "mixed"
    """vLLM's attention, which skips the scored decodes (length 0), then ours, which skips the rest."""
    SCORED = "scored"
    """Ours alone: every row decodes and is scored."""
    HOLES = "holes"
    """vLLM's attention alone, on tables without holes: some evict, and nobody is scored."""
    SHARED = "shared"
    """As ``MIXED``, where KV heads of some rows share slots: these are ours, which finds keys by page."""


def variants_for(
    policy: Policy, *, may_share: bool = False, shares: bool = False
) -> tuple[Variant, ...]:
    """What a server captures for each batch size, by its default policy.

    ``MIXED`` serves every batch with budgets whose heads keep to themselves. In one where all decode and
    are scored it launches vLLM's kernels for nothing, in one where nobody is scored ours: two launches per
    layer, at some 5 us about 0.16 ms of a step of 32 layers that takes 6. A graph for each case would be
    51 more captures at 1,024 requests, which costs every server start-up time and memory.
    So it has one of them: what suits the policy that requests have if they name none.

    Heads that share slots have to have a graph of their own: a kernel that reads by page waits for one more
    load per tile, for which nobody else should pay.

    Args:
        may_share: whether requests may ask for it. shares: whether they do if they say nothing; then its
            graph takes the place of the one that saves time.
    """
    quicker = Variant.SCORED if policy.needs_scores else Variant.HOLES
    if not may_share:
        return Variant.STOCK, Variant.MIXED, quicker
    if shares:
        return Variant.STOCK, Variant.MIXED, Variant.SHARED
    return Variant.STOCK, Variant.MIXED, quicker, Variant.SHARED


def variants_of(config: H2OConfig) -> tuple[Variant, ...]:
    """:func:`variants_for` the server of this configuration, which knows whether its engine can share."""
    return variants_for(
        config.default_policy,
        may_share=not config.kv_heads_equal_because,
        shares=config.heads_of(config.default_policy) == "shared",
    )


def variant_of(
    rows: StepRows | None,
    captured: tuple[Variant, ...] = tuple(Variant),
    *,
    shares: bool = False,
) -> Variant:
    """Which kernels serve a batch; ``rows`` is ``None`` in one in which nobody evicts.

    Args:
        shares: whether the heads of any row share slots.
    """
    if rows is None:
        return Variant.STOCK
    if shares:
        return Variant.SHARED
    if Variant.HOLES in captured and not rows.scored_queries.any():
        return Variant.HOLES
    all_ours = bool((rows.decodes | (rows.query_lens == 0)).all())
    return Variant.SCORED if all_ours and Variant.SCORED in captured else Variant.MIXED


def row_flags(rows: StepRows, shared: NDArray[np.bool_] | None = None) -> NDArray[np.int32]:
    """[B]: as ``compact_tables`` and the plan want them; "scored" are those that our kernels attend.

    Args:
        shared: [B], rows that vLLM's kernels cannot read.
    """
    ours = rows.decodes if shared is None else rows.decodes | shared
    flags = np.where(rows.evicts, EVICTING, 0) | np.where(ours, SCORED, 0)
    return flags.astype(np.int32)


@dataclass
class StepVariant:
    """Shared by the metadata builder, which decides, and the graph manager, which obeys.

    Attributes:
        current: of the batch whose metadata was built last.
        capturing: what a CUDA graph is being captured for, or ``None``.
        captured: what graphs are captured for.
    """

    current: Variant = Variant.STOCK
    capturing: Variant | None = None
    captured: tuple[Variant, ...] = tuple(Variant)
