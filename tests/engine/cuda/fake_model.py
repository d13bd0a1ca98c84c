# SPDX-License-Identifier: Apache-2.0
"""A model of which only queries, keys and values are there, for :mod:`tests.engine.cuda.fake_gpu`."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.engine.cuda.fake_kernels import FP8

LAYERS, HEADS, KV_HEADS, SIZE = 2, 4, 2, 64
SCALE = SIZE**-0.5
SCALES = {"_q_scale": 0.03, "_k_scale": 0.02, "_v_scale": 0.05}
"""What an 8-bit query, key or value of 1 stands for."""
UNEVEN = "uneven"
"""How the names of some requests begin, whose KV heads need different numbers of tokens."""


def module_of(layer: int, readers: int) -> Any:
    """What a reference is told of a layer, of which the last ``readers`` have queries alone."""
    count = LAYERS + readers
    config = SimpleNamespace(
        num_hidden_layers=count,
        num_kv_shared_layers=readers,
        layer_types=["full_attention"] * count,
    )
    return SimpleNamespace(layer_idx=layer, is_kv_shared_layer=layer >= LAYERS, config=config)


def qkv(request_id: str, position: int, layer: int, fp8: bool = False) -> tuple[Tensor, ...]:
    """q [HEADS, SIZE], k and v [KV_HEADS, SIZE] of a token: random, always the same.

    Of requests whose names begin with :data:`UNEVEN` one head looks everywhere, the other at few tokens.

    Args:
        fp8: what is left of them in 8 bits.
    """
    seed = zlib.crc32(f"{request_id.partition('+')[0]}/{position}/{layer}".encode())
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, SIZE, generator=gen) * 2
    k, v = torch.randn(2, KV_HEADS, SIZE, generator=gen)
    if request_id.startswith(UNEVEN):
        keen = layer % KV_HEADS
        q.view(KV_HEADS, -1, SIZE)[keen, :, 0] = 8.0
        k[keen, 0] = 0.0 if position % 16 else 6.0
        k[1 - keen] *= 0.2
    if not fp8:
        return q, k, v
    scales = zip((q, k, v), SCALES.values(), strict=True)
    return tuple(exact.div(scale).to(FP8).float() * scale for exact, scale in scales)
