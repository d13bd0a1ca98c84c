# SPDX-License-Identifier: Apache-2.0
"""WHAT to keep: the policies. Plain Python and torch, no vLLM."""

from __future__ import annotations

from h2o_vllm.policy.base import BlockSplit, Policy
from h2o_vllm.policy.baselines import FullPolicy, RandomPolicy, WindowPolicy
from h2o_vllm.policy.best_rank import (
    CAOTEKeyDiffPolicy,
    CAOTESnapKVKeyDiffPolicy,
    SnapKVKeyDiffPolicy,
    ZapCAOTESnapKVKeyDiffPolicy,
    ZapKeyDiffPolicy,
    ZapSnapKVKeyDiffPolicy,
)
from h2o_vllm.policy.candidates import Candidates
from h2o_vllm.policy.caote import CAOTEPolicy
from h2o_vllm.policy.h2o import H2OPolicy
from h2o_vllm.policy.h2o_norm import H2ONormPolicy
from h2o_vllm.policy.keydiff import KeyDiffPolicy
from h2o_vllm.policy.snapkv import SnapKVPolicy
from h2o_vllm.policy.tova import TOVAPolicy
from h2o_vllm.policy.zap import ZapPolicy

__all__ = [
    "BlockSplit",
    "Candidates",
    "Policy",
    "get_policy",
]

_POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        H2OPolicy(),
        H2ONormPolicy(),
        CAOTEPolicy(),
        SnapKVPolicy(),
        TOVAPolicy(),
        KeyDiffPolicy(),
        CAOTEKeyDiffPolicy(),
        SnapKVKeyDiffPolicy(),
        CAOTESnapKVKeyDiffPolicy(),
        ZapPolicy(),
        ZapKeyDiffPolicy(),
        ZapSnapKVKeyDiffPolicy(),
        ZapCAOTESnapKVKeyDiffPolicy(),
        WindowPolicy(),
        RandomPolicy(),
        FullPolicy(),
    )
}


def get_policy(name: str) -> Policy:
    """The policy called ``name``; the name has been checked by :class:`h2o_vllm.config.options.H2OConfig`."""
    return _POLICIES[name]
