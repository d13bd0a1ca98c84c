# SPDX-License-Identifier: Apache-2.0
"""Batches for tests of what is read from counts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from h2o_vllm.blocks.plan import EvictionParams
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.engine.worker.rows import StepRows
from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.ranks import NEVER

if TYPE_CHECKING:
    from h2o_vllm.engine.cuda.variants import Variant


def params_of(policy: Policy, prompt: int = 9, **more: int) -> EvictionParams:
    """What a worker is told of a request."""
    return EvictionParams(policy.first_scored(prompt), **more)


def rows_of(
    policies: list[Policy | None],
    query_lens: list[int],
    seq_lens: list[int],
    prompts: list[int] | None = None,
) -> StepRows:
    """Rows of requests that evict by these policies, or do not evict; ``query_lens`` may have padding."""
    count = len(policies)
    starts = np.array([0, *np.cumsum(query_lens)], dtype=np.int32)
    known = [
        EvictionParams(NEVER) if one is None else params_of(one, prompt)
        for one, prompt in zip(policies, prompts or [0] * count, strict=True)
    ]
    return StepRows.of(
        np.array([one is not None for one in policies]),
        starts,
        np.array(seq_lens, dtype=np.int32),
        np.array([one.first_scored for one in known], dtype=np.int32),
    )


def captured_by(policy: str, heads: str | None = None) -> tuple[Variant, ...]:
    """What a server with this default policy captures; ``heads``: its default, if they may share slots."""
    from h2o_vllm.engine.cuda.variants import variants_of

    reason = "" if heads else "not here"
    options = {"kv_policy": policy, "kv_heads": heads, "kv_calibration": "unread"}
    return variants_of(H2OConfig(**options, equal_heads_reason=reason))
