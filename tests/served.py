# SPDX-License-Identifier: Apache-2.0
"""The policies that tests go through: every rank alone, and the sets that presets stand for."""

from h2o_vllm.policy.policy import Policy
from h2o_vllm.policy.presets import PRESETS
from h2o_vllm.policy.ranks import RANKS


def policy_of(name: str) -> Policy:
    """What ``name`` is where there is a calibration."""
    return Policy.parse(name, calibrated=True)


SERVED = tuple(
    dict.fromkeys(
        [
            *(rank.name for rank in RANKS),
            *(preset.ranks for preset in PRESETS),
            *(one.calibrated for one in PRESETS if one.calibrated),
            *(one.bounded for one in PRESETS if one.bounded),
        ]
    )
)
SHARING = tuple(name for name in SERVED if not policy_of(name).equal_heads_reason)
COUNTED = ("attention", "key", "window")
"""One of each that a block's counts tell apart: scores are collected, none are, no token moves."""
