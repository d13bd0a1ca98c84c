# SPDX-License-Identifier: Apache-2.0
"""Which part of the model a worker holds: a stage's layers, a rank's KV heads. Worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from vllm.distributed.parallel_state import get_pp_group

from h2o_vllm.errors import ConfigError
from h2o_vllm.policy.candidates import head_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ModelShard", "of_all_stages"]

Told = TypeVar("Told")


def of_all_stages(told: Told, stages: int) -> list[Told]:
    """What each stage of the pipeline tells the others, first stage first. All of them have to call it.

    It travels between the hosts, and is for few bytes.
    """
    if stages == 1:
        return [told]
    everything: list[Told] = [told] * stages
    torch.distributed.all_gather_object(everything, told, group=get_pp_group().cpu_group)
    return everything


@dataclass(frozen=True)
class ModelShard:
    """The evictable layers and the KV heads that a worker holds, counted among the model's.

    Attributes:
        first_layer, first_head: the number of its first one. own_layers, own_heads: how many it has.
        layers, heads: how many the model has.
        is_first_copy: whether no rank before it holds its heads. Where a model has fewer KV heads than ranks,
            vLLM gives each to several neighbours.
        norms: of the whole model, see :func:`h2o_vllm.engine.compat.model_norms`, float32.
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
        told: Sequence[tuple[int, Mapping[str, float]]],
    ) -> ModelShard:
        """The shard of one worker.

        Args:
            rank, ranks: of tensor parallelism. heads: KV heads of a layer in the model. own_heads: here.
            stage: number of the pipeline's stage.
            told: what each stage has: its number of evictable layers, and its layers' norms by name.

        Raises:
            ConfigError: this rank has other heads than it should.
        """
        expected = max(1, heads // ranks)
        if own_heads != expected:
            raise ConfigError(
                f"h2o_vllm expected {expected} of the model's {heads} KV heads on each of {ranks} ranks, and "
                f"a rank has {own_heads}: it would rank other heads than it has. Refusing to start"
            )
        counts = [layers for layers, _ in told]
        norms = {name: size for _, of_stage in told for name, size in of_stage.items()}
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
        """The number of its first head in its first layer, see :func:`.head_number`."""
        return head_number(self.first_layer, self.first_head)

    @property
    def own(self) -> slice:
        """Its layers among the model's."""
        return slice(self.first_layer, self.first_layer + self.own_layers)
