# SPDX-License-Identifier: Apache-2.0
"""What an engine cannot do, whatever its options say. Every process; imports nothing.

No options: the engine knows, see :func:`h2o_vllm.engine.support.check.config_of`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineLimits"]


@dataclass(frozen=True)
class EngineLimits:
    """Why an engine cannot do something, as a refusal says it; empty: it can.

    Attributes:
        kv_heads_equal_because: let heads share slots.
        kv_settles_not_because: let segments settle.
        kv_exact_not_because: serve exact requests.
        kv_scores_not_because: let a policy collect attention.
        kv_ops_because: rank by what no GPU kernel computes (:attr:`.Rank.op`).
    """

    kv_heads_equal_because: str = ""
    kv_settles_not_because: str = ""
    kv_exact_not_because: str = ""
    kv_scores_not_because: str = ""
    kv_ops_because: str = ""
