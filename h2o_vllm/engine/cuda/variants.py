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

    from h2o_vllm.engine.rows import StepRows

__all__ = ["StepVariant", "Variant", "row_flags", "variant_of"]


class Variant(Enum):
    """Which kernels serve a batch.

    A replayed CUDA graph cannot branch on its batch, so each variant is captured on its own
    and the step picks one: a batch without budgets then launches exactly what stock vLLM launches.
    """

    STOCK = "stock"
    """vLLM's attention alone: nobody in the batch evicts."""
    MIXED = "mixed"
    """vLLM's attention, which skips the scored decodes (length 0), then ours, which skips the rest."""
    SCORED = "scored"
    """Ours alone: every row decodes and is scored."""


def variant_of(rows: StepRows | None) -> Variant:
    """Which kernels serve a batch; ``None`` is one in which nobody evicts."""
    if rows is None:
        return Variant.STOCK
    all_ours = bool((rows.decodes | (rows.query_lens == 0)).all())
    return Variant.SCORED if all_ours else Variant.MIXED


def row_flags(rows: StepRows) -> NDArray[np.int8]:
    """[B]: as ``compact_tables`` wants them; "scored" are those that our kernel attends."""
    flags = np.where(rows.codes > 0, EVICTING, 0) | np.where(rows.decodes, SCORED, 0)
    return flags.astype(np.int8)


@dataclass
class StepVariant:
    """Shared by the metadata builder, which decides, and the graph manager, which obeys.

    Attributes:
        current: of the batch whose metadata was built last.
        capturing: what a CUDA graph is being captured for, or ``None``.
    """

    current: Variant = Variant.STOCK
    capturing: Variant | None = None
