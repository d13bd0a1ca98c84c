# SPDX-License-Identifier: Apache-2.0
"""What a token's key and value say of it, wherever in the text it stands.

Rotary positions turn pairs of a key's numbers: by how much depends on the place, but a pair's length stays.
So the features are these lengths, what of a key is not turned, and the value. No code has to know where a
token stands, or how a model counts positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Rotation", "features", "num_features"]

MOST = 2048
"""Features that one regression is given at most: sums over tokens have the square of that."""


class Rotation(NamedTuple):
    """Which of a key's D numbers are turned, in pairs.

    Attributes:
        size: the first so many; 0 where positions are not rotary.
        interleaved: pairs are neighbours (GPT-J's way), in place of halves of ``size`` (GPT-NeoX's).
    """

    size: int
    interleaved: bool = False


def features(keys: Tensor, values: Tensor, rotation: Rotation) -> Tensor:
    """Of T tokens, float32: [1, T, F], from all KV heads together, or [KH, T, F] where that is too much.

    Args:
        keys: [KH, T, D], rotated or not. values: [KH, T, DV].
    """
    known = torch.cat([_lengths(keys.float(), rotation), values.float()], -1)
    heads, tokens, count = known.shape
    return known if heads * count > MOST else known.transpose(0, 1).reshape(1, tokens, -1)


def num_features(heads: int, key_size: int, value_size: int, rotation: Rotation) -> int:
    """F."""
    count = key_size - rotation.size // 2 + value_size
    return count if heads * count > MOST else heads * count


def _lengths(keys: Tensor, rotation: Rotation) -> Tensor:
    turned, plain = keys[..., : rotation.size], keys[..., rotation.size :]
    if rotation.interleaved:
        pairs = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        pairs = turned.unflatten(-1, (2, rotation.size // 2)).unbind(-2)
    return torch.cat([(pairs[0].square() + pairs[1].square()).sqrt(), plain], -1)
