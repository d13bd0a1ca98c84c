# SPDX-License-Identifier: Apache-2.0
"""The part of the model in one worker: its stage's layers, its rank's KV heads. Worker process; no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from h2o_vllm.errors import ConfigError
from h2o_vllm.policy.fresh import head_number


@dataclass(frozen=True)
class ModelShard:
    """The evictable layers and the KV heads of one worker.

    Attributes:
        first_layer, first_head: index in the model of the first layer and of the first head.
        own_layers, own_heads: number of layers and heads in the worker.
        layers, heads: number of layers and heads in the model.
        is_first_copy: whether no earlier rank has the same heads. If a model has fewer KV heads than ranks,
            vLLM copies each head to several neighbouring ranks.
        norms: norms of the whole model, see :func:`h2o_vllm.engine.compat.model_norms`, float32.
    """

    first_layer: int
    own_layers: int
    layers: int
    first_head: int
    own_heads: int
    heads: int
    is_first_copy: bool
    norms: torch.Tensor

    @classmethod
    def of(
        cls,
        rank: int,
        ranks: int,
        heads: int,
        own_heads: int,
        stage: int,
        stages: Sequence[tuple[int, Mapping[str, float]]],
    ) -> ModelShard:
        """The shard of one worker.

        Args:
            rank, ranks: this tensor-parallel rank, and their number.
            heads: KV heads of a layer in the model. own_heads: KV heads in this worker.
            stage: index of the pipeline stage.
            stages: of each stage, the number of evictable layers and the norms of its layers, by name.

        Raises:
            ConfigError: this rank does not have the expected number of heads.
        """
        expected = max(1, heads // ranks)
        if own_heads != expected:
            raise ConfigError(
                f"h2o_vllm expected {expected} of the model's {heads} KV heads on each of {ranks} ranks, and "
                f"a rank has {own_heads}: it would rank other heads than it has. Refusing to start"
            )
        counts = [layers for layers, _ in stages]
        norms = {name: size for _, of_stage in stages for name, size in of_stage.items()}
        return cls(
            first_layer=sum(counts[:stage]),
            own_layers=counts[stage],
            layers=sum(counts),
            first_head=rank * heads // ranks,
            own_heads=own_heads,
            heads=heads,
            is_first_copy=rank == 0 or rank * heads // ranks != (rank - 1) * heads // ranks,
            norms=torch.tensor([norms[name] for name in sorted(norms)], dtype=torch.float32),
        )

    @property
    def first_number(self) -> int:
        """The :func:`.head_number` of its first head in its first layer."""
        return head_number(self.first_layer, self.first_head)

    @property
    def own(self) -> slice:
        """The indices of its layers in the model."""
        return slice(self.first_layer, self.first_layer + self.own_layers)
