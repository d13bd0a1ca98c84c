# SPDX-License-Identifier: Apache-2.0
"""What the reference of the policies knows of one layer. Imports nothing of h2o_vllm."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_TINY = 1e-30
"""Below any score that counts."""


@dataclass
class Layer:
    """What one layer has computed.

    ``keys``, ``values``: [KH, S, D]; ``alive``: [KH, S]; ``seen``: per forward pass, what its T queries
    gave to the S tokens so far, in all layers that read them, [KH, T, S]; ``ranks``: of policies that
    rank in several ways, whose best rank each token has: those of an eviction that have one rank have one
    number, [KH, S]; ``margins``: how near each token came, in any eviction, to the fate of those on the
    other side of its head's border, by its score and relative to it, [KH][position]; ``calibration``: of
    the layer, if there is one, [KH, F + 1].
    """

    keys: Tensor
    values: Tensor
    alive: Tensor
    seen: list[Tensor]
    ranks: Tensor | None = None
    margins: list[dict[int, float]] = field(default_factory=list)
    calibration: Tensor | None = None

    def rows(self) -> Tensor:
        """The attention matrix, [KH, Q, S], its groups of query heads summed."""
        count = self.keys.shape[1]
        return torch.cat([pad(rows, (0, count - rows.shape[2])) for rows in self.seen], 1)


def note_margins(
    margins: dict[int, float],
    scores: list[float],
    together: list[int] | None,
    candidates: list[int],
    kept: int,
) -> None:
    """Of ``candidates``, the best first, so many were kept; see :class:`Layer`.

    Two of one rank have one score, less what parts them: rounding cannot swap them, so they are never near.
    """
    if kept == len(candidates):
        return
    for place, position in enumerate(candidates):
        other = candidates[kept if place < kept else kept - 1]
        if together is None or together[position] != together[other]:
            mine = scores[position]
            apart = abs(mine - scores[other]) / max(abs(mine), _TINY)
            margins[position] = min(apart, margins.get(position, math.inf))


def kv_owner(module: Any) -> int:
    """The layer whose keys and values this layer's queries see: its own, or that of an earlier layer.

    Gemma 3n, Gemma 4 E: the last ``num_kv_shared_layers`` layers read those of the last layer before them
    that is of their kind.
    """
    layer: int = module.layer_idx
    if not getattr(module, "is_kv_shared_layer", False):
        return layer
    config, kinds = module.config, module.config.layer_types
    own = config.num_hidden_layers - config.num_kv_shared_layers
    return max(other for other in range(own) if kinds[other] == kinds[layer])
