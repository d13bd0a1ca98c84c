# SPDX-License-Identifier: Apache-2.0
"""The models whose shapes the CPU benchmark has."""

from typing import NamedTuple

BLOCK_SIZE = 32
"""Tokens."""


class Shape(NamedTuple):
    """Layers, and the heads of one."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int


SHAPES = {"SmolLM2-135M": Shape(30, 9, 3, 64), "8B": Shape(32, 32, 8, 128)}
