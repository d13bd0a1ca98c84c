# SPDX-License-Identifier: Apache-2.0
"""The table of settings, a row each: what requests get that name nothing, and limits of what they may name.

Runs in every process; imports its siblings and the presets. What follows from several rows:
:mod:`h2o_vllm.config.options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from h2o_vllm.config.engine_limits import EngineLimits
from h2o_vllm.config.fields import Field, rows_of, setting
from h2o_vllm.config.request_fields import HEADS, MAX_DELAY, PROTECT_WORDS
from h2o_vllm.errors import ConflictError
from h2o_vllm.policy.policy import joinable_ranks
from h2o_vllm.policy.presets import PRESETS

ADMISSIONS = ("squeeze", "queue")
"""What ``--kv-elastic-admission`` may be."""

MOST_DRAFTS = 16
"""Of ``--kv-exact-drafts``."""

FULL_KERNELS = ("auto", "vllm", "h2o")
"""What ``--kv-full-kernel`` may be."""


@dataclass(frozen=True)
class Settings(EngineLimits):
    """A server's, one attribute per row.

    A row that is ``asked`` is a field of a request, too; what stands here is its default.
    """

    kv_budget: float = setting(
        1.0,
        "Share of its tokens a request keeps: 0.2 is kvpress' compression_ratio 0.8.",
        asked=True, high=1, low_open=True,
    )  # fmt: skip
    kv_budget_tokens: int | None = setting(
        None, "Keep this many tokens instead.",
        asked=True, low=1, metavar="N",
        excludes={
            "kv_budget": "one of them says how much stays",
            "kv_settle_tokens": "of each segment a share stays, which kv_budget says",
        },
    )  # fmt: skip
    kv_recent: float | None = setting(
        None,
        "Share of the budget for the newest tokens; else the policy's own, more behind protected prompts.",
        asked=True, high=1, attribute="recent", reported="recent", says_how=True, settling_ignores=True,
    )  # fmt: skip
    kv_policy: str = setting(
        "auto",
        "Which tokens stay beside the newest. "
        + "; ".join(f"{preset.name}: {preset.use}" for preset in PRESETS)
        + f". Or ranks, joined by +: {'+'.join(joinable_ranks(calibrated=True))}.",
        asked=True, metavar="POLICY", attribute="policy", reported="policy", says_how=True,
    )  # fmt: skip
    kv_heads: str | None = setting(
        None,
        "Tokens per KV head: equal, or by need.",
        asked=True, words=HEADS, attribute="heads", reported="heads", says_how=True, off=HEADS[0],
        excludes={"kv_settle_tokens": "in what has settled every head has its own slots"},
    )  # fmt: skip
    kv_protect: int | str | None = setting(
        None,
        "First tokens beside the budget; else by policy: the prompt, if it is short.",
        asked=True, words=PROTECT_WORDS, metavar="N|prompt|system|task|short", attribute="protect",
        says_how=True,
    )  # fmt: skip
    kv_delay: int = setting(
        16,
        "Generated tokens before the first eviction; lossless until then.",
        asked=True, high=MAX_DELAY, attribute="delay", reported="delay", says_how=True, settling_ignores=True,
    )  # fmt: skip
    kv_elastic: bool = setting(
        False,
        "Keep all until memory is short.",
        asked=True, attribute="elastic", reported="elastic", says_how=True,
        excludes={
            "kv_evict_from": "memory says when evictions begin",
            "kv_settle_tokens": "what has settled does not wait for memory to be short",
        },
    )  # fmt: skip
    kv_prefill_tokens: int = setting(
        0,
        "Unprotected tokens a prompt may hold while it is computed; 0: all.",
        asked=True, attribute="prefill", reported="prefill_tokens", says_how=True,
        excludes={"kv_settle_tokens": "a prompt settles while it is computed, which bounds it"},
    )  # fmt: skip
    kv_settle_tokens: int = setting(
        0,
        "Newest tokens kept whole; older ones settle at kv_budget; 0: off.",
        asked=True, attribute="settle", reported="settle_tokens", says_how=True,
    )  # fmt: skip
    kv_exact: bool = setting(
        False,
        "Lossless; drafts read kv_budget.",
        asked=True, attribute="exact", reported="exact",
    )  # fmt: skip
    kv_exact_drafts: int = setting(
        0,
        "Drafts for kv_exact; 0: none.",
        high=MOST_DRAFTS, metavar="N",
    )  # fmt: skip
    kv_budget_min: float = setting(
        0.01,
        "Smallest kv_budget one may ask for.",
        high=1,
        low_open=True,
    )
    kv_budget_max: float = setting(
        1.0,
        "Largest kv_budget one may ask for.",
        high=1,
        low_open=True,
    )
    kv_min_tokens: int = setting(
        128,
        "No budget falls below so many tokens; a short prompt has up to four times as many.",
        low=1,
        metavar="N",
    )
    kv_protect_max: int | None = setting(
        None,
        "Most tokens one may protect; else the prompt, or 1024 if --kv-budget-max is below 1.",
        metavar="N",
    )
    kv_elastic_admission: str = setting(
        "squeeze",
        "For a waiting prompt elastic requests yield (squeeze), or it waits (queue).",
        words=ADMISSIONS,
    )
    kv_turn_seconds: float = setting(
        0.2,
        "How long settled blocks of an answer are kept for its next turn while others wait; 0: not.",
        high=60, metavar="S",
    )  # fmt: skip
    kv_full_kernel: str = setting(
        "auto",
        "Of lossless rows; auto: h2o on AMX.",
        words=FULL_KERNELS,
    )
    kv_trace: bool = setting(False, "Let requests ask what was kept.")
    kv_calibration: str | None = setting(None, "From python -m h2o_vllm.calibrate.", metavar="FILE")


OPTIONS = rows_of(Settings)
"""The rows of the table: a server's options."""

ASKED_ONLY = (
    Field(
        "For tests: evict nothing before this many tokens have been seen.",
        name="kv_evict_from", asked=True, kind=int, optional=True, low=1, says_how=True,
        excludes={"kv_settle_tokens": "segments settle where they end"},
    ),
    Field(
        "Report which tokens each layer and KV head holds, where the server lets requests ask.",
        name="kv_trace", asked=True, kind=bool, default=False,
        excludes={
            "kv_settle_tokens": "no trace follows tokens that several requests hold",
            "kv_exact": "an exact request loses no token",
        },
    ),
)  # fmt: skip
"""Request fields that help to test, to debug and to see; a server has no default for them."""

FIELDS = {row.name: row for row in (*OPTIONS, *ASKED_ONLY) if row.asked}
"""The request fields, by name."""

REQUEST_FIELDS = tuple(FIELDS)
"""Their names, accepted at the top level of a body and inside ``vllm_xargs``."""

TESTING_FIELDS = tuple(row.name for row in ASKED_ONLY)


def excluding(name: str, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """A field in ``given`` beside which ``name`` cannot be in effect, and why; ``None``: there is none."""
    for other, value in given.items():
        if name in FIELDS[other].excludes and FIELDS[other].is_on(value):
            return other, FIELDS[other].excludes[name]
    return None


def check_exclusions(given: Mapping[str, Any]) -> None:
    """Check that each of the request fields in ``given`` can be in effect beside the others.

    Raises:
        ConflictError: one cannot; it names that one, the other, and why.
    """
    for name, value in given.items():
        if FIELDS[name].is_on(value) and (found := excluding(name, given)):
            raise ConflictError(name, value, f"left out with {found[0]}: {found[1]}")
