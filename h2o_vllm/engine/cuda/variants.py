# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve a batch, and so which CUDA graph it replays. Worker process."""

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


class Variant(Enum):
    """Which kernels serve a batch.

    A replayed CUDA graph cannot branch on its batch. So each variant has graphs of its own, and each step
    selects a variant. A batch without budgets launches exactly what stock vLLM launches.

    Not all variants are captured, see :func:`variants_of`. ``SCORED`` and ``HOLES`` only save time: without
    their graphs, their batches are served as ``MIXED``.
    """

    STOCK = "stock"
    """vLLM's attention alone: no request of the batch evicts."""
    MIXED = "mixed"
    """vLLM's attention, which skips scored decodes (length 0), then ours, which skips all other rows."""
    SCORED = "scored"
    """Our attention alone: each row decodes and is scored."""
    HOLES = "holes"
    """vLLM's attention alone, on tables without holes: some requests evict, and none is scored."""
    SHARED = "shared"
    """As ``MIXED``, where KV heads of some rows share slots: our attention finds their keys by page."""


HOLES_ONLY = (Variant.HOLES,)
"""Of a server that collects no attention: all its batches have tables without holes, in vLLM's own graphs."""


def variants_of(config: H2OConfig) -> tuple[Variant, ...]:
    """The variants that a server captures for each batch size, by its default policy.

    ``MIXED`` serves each batch with budgets, except where heads share slots. If all rows are scored decodes,
    its launches of vLLM's kernels do nothing; if no row is scored, its launches of ours do nothing. These two
    launches per layer take about 5 us: 0.16 ms of a step of 32 layers that takes 6 ms. A graph for each case
    would be 51 more captures at 1,024 requests, which costs start-up time and memory. So a server captures
    only the one that fits its default policy.

    Shared heads have graphs of their own: a kernel that finds keys by page waits for one more load per tile,
    which should not slow down other requests. If heads share slots by default, ``SHARED`` replaces the
    variant that only saves time.
    """
    if config.no_scores_reason:
        return HOLES_ONLY
    policy = config.default_policy
    quicker = Variant.SCORED if policy.needs_scores else Variant.HOLES
    if config.equal_heads_reason:
        return Variant.STOCK, Variant.MIXED, quicker
    if config.heads_of(policy) == "shared":
        return Variant.STOCK, Variant.MIXED, Variant.SHARED
    return Variant.STOCK, Variant.MIXED, quicker, Variant.SHARED


def variant_of(
    rows: StepRows | None,
    captured: tuple[Variant, ...] = tuple(Variant),
    *,
    shares: bool = False,
) -> Variant:
    """The variant that serves a batch.

    Args:
        rows: the rows of the batch; ``None``: no row evicts.
        captured: the variants that have graphs.
        shares: whether the heads of any row share slots.
    """
    if rows is None:
        return Variant.STOCK
    if shares:
        return Variant.SHARED
    if Variant.HOLES in captured and not rows.scored.any():
        return Variant.HOLES
    all_ours = bool((rows.decodes | (rows.query_lens == 0)).all())
    return Variant.SCORED if all_ours and Variant.SCORED in captured else Variant.MIXED


def row_flags(rows: StepRows, shared: NDArray[np.bool_] | bool = False) -> NDArray[np.int32]:
    """Flags of each row for ``compact_tables`` and the plan, [B]. ``SCORED`` marks rows that we attend.

    Args:
        shared: [B], rows whose heads share slots, which vLLM's kernels cannot read.
    """
    flags = np.where(rows.evicts, EVICTING, 0) | np.where(rows.decodes | shared, SCORED, 0)
    return flags.astype(np.int32)


@dataclass
class StepVariant:
    """What the runner, the metadata builder and the graph manager tell each other of a step.

    Attributes:
        slots: of the batch's requests in the runner's request table, [B] without padding; the runner sets it
            anew in each step. current: the variant of the batch whose metadata was built last.
        capturing: the variant for which a CUDA graph is being captured, or ``None``.
        captured: the variants that have graphs.
    """

    slots: NDArray[np.intp] | None = None
    current: Variant = Variant.STOCK
    capturing: Variant | None = None
    captured: tuple[Variant, ...] = tuple(Variant)
