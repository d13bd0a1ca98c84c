# SPDX-License-Identifier: Apache-2.0
"""Of models that mix attention with states only the shape: what a request of theirs holds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["HYBRIDS", "Hybrid"]

_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Hybrid:
    """The sizes of what a model holds of a request.

    Attributes:
        attention: layers with full attention. kv_heads, head_size: of each of them, in bfloat16.
        states: layers that keep a state. shapes: of a layer's states, with their dtypes.
        source: of the figures.
    """

    name: str
    attention: int
    kv_heads: int
    head_size: int
    states: int
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    source: str

    @property
    def token_bytes(self) -> int:
        """KV of a token in one layer."""
        return 2 * self.kv_heads * self.head_size * _BYTES["bfloat16"]

    @property
    def state_bytes(self) -> int:
        """States of a request in one layer."""
        return sum(math.prod(shape) * _BYTES[dtype] for shape, dtype in self.shapes)

    def block_size(self, least: int) -> int:
        """Tokens per block: ``least``, or as many multiples of it as hold a layer's state.

        As ``Platform._align_hybrid_block_size`` of vLLM 0.32 has it.
        """
        return least * max(1, math.ceil(self.state_bytes / (least * self.token_bytes)))


HYBRIDS = {
    shape.name: shape
    for shape in (
        # Gated delta networks: 16 key heads and 48 value heads of 128, a convolution over 4 tokens. The block
        # of 784 tokens that it gives, where 16 is least, is the one that vLLM logs for this model.
        Hybrid(
            "qwen3.5-27b", 16, 4, 256, 48,
            (((3, 2 * 16 * 128 + 48 * 128), "bfloat16"), ((48, 128, 128), "float32")),
            "Qwen/Qwen3.5-27B, config.json",
        ),
        # Short convolutions over 3 tokens.
        Hybrid(
            "lfm2-1.2b", 6, 8, 64, 10, (((2, 2048), "bfloat16"),), "LiquidAI/LFM2-1.2B, config.json"
        ),
    )
}  # fmt: skip
"""By name, as ``--model`` takes it."""
