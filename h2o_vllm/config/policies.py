# SPDX-License-Identifier: Apache-2.0
"""The names of the policies, and what other options must know of them. Every process; imports nothing.

The policies themselves are in :mod:`h2o_vllm.policy`, which needs torch.
"""

__all__ = [
    "BOUNDED_POLICY",
    "CALIBRATED_POLICY",
    "DEFAULT_POLICY",
    "EQUAL_HEADS_POLICIES",
    "POLICIES",
    "PROMPT_END_POLICIES",
    "RECENT_SHARES",
    "REMOVED_POLICIES",
    "ZAP_POLICIES",
]

POLICIES = (
    "h2o",
    "h2o-norm",
    "caote",
    "snapkv",
    "tova",
    "keydiff",
    "caote-keydiff",
    "snapkv-keydiff",
    "caote-snapkv-keydiff",
    "zap",
    "zap-keydiff",
    "zap-snapkv-keydiff",
    "zap-caote-snapkv-keydiff",
    "window",
    "random",
    "full",
)
"""Names accepted as ``kv_policy``, ``full`` last; see :mod:`h2o_vllm.policy`."""

DEFAULT_POLICY, CALIBRATED_POLICY = "caote-snapkv-keydiff", "zap-caote-snapkv-keydiff"
"""What ranks if nobody says: in an engine that has no calibration, and in one that has."""

BOUNDED_POLICY = "zap-keydiff"
"""The same for prompts that are bounded while they are computed, in an engine that has a calibration.

What adds up attention forgets what was foretold of a long prompt's first tokens: the queries of the rest of
it outweigh that.
"""

RECENT_SHARES = {
    "caote-keydiff": 0.25,
    "snapkv-keydiff": 0.25,
    "caote-snapkv-keydiff": 0.25,
    "zap": 0.1,
    "zap-keydiff": 0.1,
    "zap-snapkv-keydiff": 0.25,
    "zap-caote-snapkv-keydiff": 0.25,
}
"""Share of the newest tokens, of those for which it is not the paper's half.

A policy with several ranks has few tokens for each. Predicted scores know what will be needed, the newest
tokens included.
"""

ZAP_POLICIES = ("zap", "zap-keydiff", "zap-snapkv-keydiff", "zap-caote-snapkv-keydiff")
"""Predict the scores of tokens, in an engine with a calibration; see :mod:`h2o_vllm.policy.zap`."""

REMOVED_POLICIES = {"repeat": "zap", "repeat-keydiff": "zap-keydiff"}
"""Policies of earlier releases, and what replaces each."""

PROMPT_END_POLICIES = ("snapkv", "snapkv-keydiff")
"""Have nothing to rank by before the prompt's end."""

EQUAL_HEADS_POLICIES = {
    "keydiff": "which measures how like the other keys of its head a key is: no measure of what a head needs",
    "window": "which drops whole blocks",
    "full": "which drops nothing",
}
"""Policies with which heads cannot share, and why."""
