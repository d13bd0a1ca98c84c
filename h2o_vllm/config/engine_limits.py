# SPDX-License-Identifier: Apache-2.0
"""What an engine cannot do or does slowly, whatever its options say. Every process; imports nothing.

No options: the engine knows, see :func:`h2o_vllm.engine.support.check.config_of`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLimits:
    """Why an engine cannot do something, as a refusal says it; empty: it can.

    Attributes:
        kv_heads_equal_because: let heads share slots.
        kv_settles_not_because: let segments settle.
        kv_exact_not_because: serve exact requests.
        kv_scores_not_because: let a policy collect attention.
        kv_heads_slow: whether decoding is slower if heads share slots; equal heads are then the default.
            On an H200 our decode kernel takes 1.2 to 1.5 times as long as FlashAttention 3, which serves
            equal heads of policies that collect no attention.
    """

    kv_heads_equal_because: str = ""
    kv_settles_not_because: str = ""
    kv_exact_not_because: str = ""
    kv_scores_not_because: str = ""
    kv_heads_slow: bool = False
