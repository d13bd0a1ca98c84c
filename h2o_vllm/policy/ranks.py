# SPDX-License-Identifier: Apache-2.0
"""The ranks: each is one measure of which tokens to keep. Every process; imports nothing of ours, no torch.

One row per rank. :class:`~h2o_vllm.policy.policy.Policy` joins rows, :mod:`h2o_vllm.policy.formulas` computes
them. Everything else that depends on a rank is a column here.
"""

from dataclasses import dataclass
from enum import IntEnum

END_QUERIES = 32
"""The prompt's end: its last queries. ``window_size`` of SnapKV's authors' experiments."""

NEVER = 2**31 - 1
"""A position that no token has."""


class Collects(IntEnum):
    """Of which queries a rank needs the attention, from the moment on that a token's KV is written."""

    NOTHING = 0
    END = 1
    """The prompt's last :data:`END_QUERIES`, and all generated ones."""
    ALL = 2


@dataclass(frozen=True)
class Rank:
    """One measure.

    Attributes:
        name: its name in ``kv_policy``.
        collects: which queries' attention it needs.
        recent: share of a budget for the newest tokens, if it ranks alone and the request does not say.
        equal_heads_reason: why the KV heads of a layer cannot share slots by its scores; empty: they can.
        calibrated: whether it needs a calibration of the model (``--kv-calibration``).
        measure: the one of :data:`.MEASURES` that it needs; empty: none.
        joins: whether it may be joined with others.
        as_collected: whether its scores are the attention as it was collected, which no eviction changes.
        anew: whether each eviction gives all tokens new scores; else a token's score is made when it is
            ranked for the first time, and later attention adds to it.
        moves: whether the best tokens of freed blocks move into kept ones; if not, whole blocks go.
        protects_prompt: whether the prompt is protected unless the request or the server says otherwise.
    """

    name: str
    collects: Collects = Collects.NOTHING
    recent: float = 0.5
    equal_heads_reason: str = ""
    calibrated: bool = False
    measure: str = ""
    joins: bool = True
    as_collected: bool = False
    anew: bool = False
    moves: bool = True
    protects_prompt: bool = False


RANKS = (
    Rank(
        "predicted",
        # It knows what of the prompt will be needed, the newest tokens included.
        recent=0.1,
        calibrated=True,
        measure="predicted",
    ),
    Rank("attention", Collects.ALL, as_collected=True),
    Rank("mean", Collects.ALL),
    Rank("value", Collects.ALL, measure="deviation"),
    Rank("end", Collects.END),
    Rank(
        "key",
        equal_heads_reason="which measures how similar a key is to others of its head: no measure of need",
        measure="similarity",
    ),
    Rank(
        "random",
        # Of 1,024 to 4,096 tokens the authors keep the newest 64.
        recent=0.05,
        equal_heads_reason="which draws as many tokens for each head",
        joins=False,
        anew=True,
        protects_prompt=True,
    ),
    Rank(
        # StreamingLLM (https://arxiv.org/abs/2309.17453).
        "window",
        equal_heads_reason="which drops whole blocks",
        joins=False,
        moves=False,
    ),
)
"""In the order in which they are joined: the first of a policy's ranks gives its scores their unit."""
