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
        equal_heads_reason: let heads share slots.
        no_settling_reason: let segments settle.
        no_exact_reason: serve exact requests.
        no_scores_reason: let a policy collect attention.
        shared_heads_slow: whether decoding is slower if heads share slots; equal heads are then the default.
            On an H200 our decode kernel takes 1.2 to 1.5 times as long as FlashAttention 3, which serves
            equal heads of policies that collect no attention.
    """

    equal_heads_reason: str = ""
    no_settling_reason: str = ""
    no_exact_reason: str = ""
    no_scores_reason: str = ""
    shared_heads_slow: bool = False
