# SPDX-License-Identifier: Apache-2.0
"""How long a step takes: by a GPU's datasheet, or fitted to rows that ``loadtest.engine`` has measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.plan.gpus import GPU
from loadtest.plan.shapes import ModelShape
from loadtest.plan.simulate import Step

__all__ = ["Server", "fitted"]

COMPUTE, MEMORY, STEP_S = 0.6, 0.75, 0.001
"""Assumed: the shares of a datasheet's operations and bandwidth that are reached, and seconds of a step that
do not depend on what is computed."""

UTILIZATION, ACTIVATIONS = 0.92, 2 << 30
"""vLLM's ``gpu_memory_utilization``; bytes that a step needs beside weights and KV: assumed."""

DTYPE_BYTES, SCORE_BYTES = 2, 4


@dataclass(frozen=True)
class Server:
    """A model in bf16 on so many GPUs; ``scored``: whether scores are kept, as of requests with a budget."""

    shape: ModelShape
    gpu: GPU
    gpus: int = 1
    scored: bool = False

    @property
    def token_bytes(self) -> int:
        """KV of a token, and its scores, on all GPUs."""
        shape = self.shape
        scores = SCORE_BYTES * shape.layers * shape.kv_heads if self.scored else 0
        return shape.kv_bytes(DTYPE_BYTES) + scores

    @property
    def pool_tokens(self) -> int:
        """Tokens for which there is KV memory."""
        free = self.gpus * (self.gpu.memory * UTILIZATION - ACTIVATIONS)
        return max(0, int(free - DTYPE_BYTES * self.shape.parameters) // self.token_bytes)

    def seconds(self, step: Step) -> float:
        """The roofline of a step: its operations or its bytes, and the constant."""
        shape = self.shape
        rows = step.prompt + step.decodes
        operations = 2 * shape.layer_parameters * rows
        operations += 2 * shape.output_parameters * (step.decodes + 1)
        operations += 4 * shape.layers * shape.heads * shape.head_size * (step.pairs + step.read)
        # Scores are read and written.
        scores = 2 * SCORE_BYTES * shape.layers * shape.kv_heads if self.scored else 0
        moved = DTYPE_BYTES * shape.parameters + step.read * (shape.kv_bytes(DTYPE_BYTES) + scores)
        compute = operations / (self.gpus * self.gpu.flops * COMPUTE)
        return max(compute, moved / (self.gpus * self.gpu.bandwidth * MEMORY)) + STEP_S


def fitted(
    sums: Sequence[Sequence[float]], walls: Sequence[float]
) -> tuple[Callable[[Step], float], list[float]]:
    """Seconds per step, prompt token, pair, decode and key read that explain measured wall times best.

    Least squares of relative errors; no cost is below 0. Figures that rows cannot tell apart are left at 0.

    Args:
        sums: of each row, see :class:`~loadtest.plan.simulate.Outcome`. walls: what each took, seconds.
    """
    matrix = np.asarray(sums, dtype=np.float64) / np.asarray(walls)[:, None]
    # In units in which all columns are alike.
    scale = np.maximum(matrix.max(0), 1e-30)
    # As many costs as rows can tell apart: keys read, prompt tokens and steps come first.
    used = [4, 1, 0, 2, 3][: len(walls)]
    costs = np.zeros(5)
    while used:
        found = np.linalg.lstsq(matrix[:, used] / scale[used], np.ones(len(walls)), rcond=None)[0]
        if (found >= 0).all():
            costs[used] = found / scale[used]
            break
        used.pop(int(found.argmin()))
    each = costs.tolist()

    def seconds(step: Step) -> float:
        counts = (1, step.prompt, step.pairs, step.decodes, step.read)
        return float(sum(cost * count for cost, count in zip(each, counts, strict=True)))

    return seconds, each
