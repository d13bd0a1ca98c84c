# SPDX-License-Identifier: Apache-2.0
"""Features of a token's key and value that do not depend on its position. Plain torch.

Rotary embeddings rotate pairs of elements of a key by an angle that depends on the position; the length of a
pair stays the same. The features are these lengths, the elements of the key that are not rotated, and the
value. So no code needs the position of a token, or the way a model counts positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MOST = 2048
"""Most features of one regression; its sums over tokens have the square of that many elements."""


class Rotation(NamedTuple):
    """Which of the D elements of a key are rotated, in pairs.

    Attributes:
        size: number of first elements that are rotated; 0 without rotary embeddings.
        interleaved: whether pairs are neighbours (GPT-J), not elements of two halves (GPT-NeoX).
    """

    size: int
    interleaved: bool = False


def features(keys: Tensor, values: Tensor, rotation: Rotation) -> Tensor:
    """Of T tokens, float32: [1, T, F], from all KV heads together, or [KH, T, F] where that is too much.

    Args:
        keys: [KH, T, D], rotated or not. values: [KH, T, DV].
    """
    known = torch.cat([key_lengths(keys.float(), rotation), values.float()], -1)
    heads, tokens, count = known.shape
    return known if heads * count > MOST else known.transpose(0, 1).reshape(1, tokens, -1)


def num_features(heads: int, key_size: int, value_size: int, rotation: Rotation) -> int:
    """F."""
    count = key_size - rotation.size // 2 + value_size
    return count if heads * count > MOST else heads * count


def key_lengths(keys: Tensor, rotation: Rotation) -> Tensor:
    """Of keys, [..., D]: the lengths of the turned pairs, then what is not turned."""
    turned, plain = keys[..., : rotation.size], keys[..., rotation.size :]
    if rotation.interleaved:
        pairs = turned.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        pairs = turned.unflatten(-1, (2, rotation.size // 2)).unbind(-2)
    lengths = pairs[0].square().addcmul_(pairs[1], pairs[1]).sqrt_()
    return torch.cat([lengths, plain], -1) if plain.shape[-1] else lengths
