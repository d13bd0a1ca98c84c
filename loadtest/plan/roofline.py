# SPDX-License-Identifier: Apache-2.0
"""How long a step takes on a GPU that is not here: the roofline of its datasheet. Pure.

Each part of a step takes as long as its operations or its bytes, whichever is more (Williams et al. 2009), at
the share of the datasheet that real kernels reach; parts follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.plan.gpus import GPU
from loadtest.plan.shapes import ModelShape, ShapeError
from loadtest.plan.work import Work

__all__ = ["Efficiency", "Roofline"]

SCORE_BYTES = 4
"""One float32 per token, layer and KV head."""

SCORED_PROMPT = 1.5
"""Attention operations of a prompt that is scored, over one that is not: its scores are the column sums
of the probabilities, made from queries and keys once more (:mod:`h2o_vllm.kernels.triton.prompt`)."""


@dataclass(frozen=True)
class Efficiency:
    """What is reached of a datasheet. Assumptions: nothing was measured on a GPU.

    Attributes:
        compute: of the tensor cores' operations, in large matrix products.
        memory: of the memory's bandwidth.
        link: of the links' bandwidth, in all-reduces.
        reduce_s: seconds of the smallest all-reduce.
        step_s: seconds of a step that do not depend on what is computed.
        request_s: seconds of a step per running request: sampling, and what the host does for it.
    """

    compute: float = 0.6
    memory: float = 0.75
    link: float = 0.7
    reduce_s: float = 10e-6
    step_s: float = 1e-3
    request_s: float = 5e-6


class Roofline:
    """Step times of a model's shape on ``tensor_parallel`` GPUs of one machine.

    Raises:
        ShapeError: the heads cannot be shared out among so many GPUs.
    """

    def __init__(
        self,
        shape: ModelShape,
        gpu: GPU,
        tensor_parallel: int = 1,
        dtype_bytes: int = 2,
        efficiency: Efficiency | None = None,
    ) -> None:
        if shape.heads % tensor_parallel:
            raise ShapeError(
                f"--tensor-parallel: got {tensor_parallel}, wanted a divisor of the {shape.heads} heads of "
                f"{shape.name}"
            )
        self.shape = shape
        self.gpus = tensor_parallel
        self.dtype_bytes = dtype_bytes
        self.efficiency = efficiency or Efficiency()
        self._flops = gpu.flops * self.efficiency.compute
        self._bandwidth = gpu.bandwidth * self.efficiency.memory
        self._link = gpu.link * self.efficiency.link

    def seconds(self, work: Work) -> float:
        """Of one step."""
        host = self.efficiency.step_s + self.efficiency.request_s * work.outputs
        return host + self.linear(work) + self.attention(work) + self.all_reduce(work)

    def linear(self, work: Work) -> float:
        """All matrix products: each weight is read once, and used for every token."""
        shape, size = self.shape, self.dtype_bytes
        operations = 2 * (
            shape.layer_parameters * work.tokens + shape.output_parameters * work.outputs
        )
        weights = (shape.layer_parameters + shape.output_parameters) * size
        # Read and written around norms, projections and the MLP.
        activations = (
            shape.layers * work.tokens * (8 * shape.hidden + 4 * shape.intermediate) * size
        )
        return self.longer(operations / self.gpus, (weights + activations) / self.gpus)

    def attention(self, work: Work) -> float:
        """Of prompts, of decodes, and the moving of what evictions keep."""
        shape = self.shape
        operations = 4 * shape.layers * shape.heads * shape.head_size / self.gpus
        kv = shape.kv_bytes(self.dtype_bytes, self.gpus)
        # Read and written.
        scores = 2 * SCORE_BYTES * shape.layers * shape.kv_heads_of(self.gpus)
        prompts = operations * (work.pairs + SCORED_PROMPT * work.scored_pairs) / self._flops
        context = work.context + work.scored_context
        decodes = self.longer(operations * context, kv * context + scores * work.scored_context)
        # At most half of the candidates move, each is read and written.
        moves = (kv + scores) * work.ranked / self._bandwidth
        return prompts + decodes + moves

    def all_reduce(self, work: Work) -> float:
        """Two per layer, in a ring: every GPU sends nearly twice the activations."""
        if self.gpus == 1:
            return 0.0
        share = 2 * (self.gpus - 1) / self.gpus
        sent = share * work.tokens * self.shape.hidden * self.dtype_bytes
        return 2 * self.shape.layers * (self.efficiency.reduce_s + sent / self._link)

    def longer(self, operations: float, bytes_moved: float) -> float:
        """Seconds of a part of a step on one GPU."""
        return max(operations / self._flops, bytes_moved / self._bandwidth)
