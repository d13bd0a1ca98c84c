# SPDX-License-Identifier: Apache-2.0
"""The table of settings, one row each: defaults of the request fields, and limits of their values.

Runs in every process; imports its siblings and the presets. :mod:`h2o_vllm.config.options` has what follows
from several rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from h2o_vllm.config.fields import Field, rows_of, setting
from h2o_vllm.config.request_fields import HEADS, MAX_DELAY, PROTECT_WORDS
from h2o_vllm.errors import BudgetError, ConflictError
from h2o_vllm.policy.policy import Policy, joinable_ranks
from h2o_vllm.policy.presets import PRESETS

ADMISSIONS = ("squeeze", "queue")
"""What ``--kv-elastic-admission`` may be."""

MOST_DRAFTS = 16
"""Largest value of ``--kv-exact-drafts``."""

FULL_KERNELS = ("auto", "vllm", "h2o")
"""What ``--kv-full-kernel`` may be."""


@dataclass(frozen=True)
class EngineLimits:
    """Why an engine cannot do something, as a refusal says it; empty: it can.

    No options: the engine knows, see :func:`h2o_vllm.engine.support.check.config_of`.

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

    def check_policy(
        self, policy: Policy, *, settle: int, prefill: int, heads: str | None, evicts: bool
    ) -> None:
        """Check that a policy and the engine can do what some fields ask for.

        Raises:
            BudgetError: one of them cannot; the error has the reason.
        """
        if settle and self.no_settling_reason:
            accepted = f"0 on this server ({self.no_settling_reason})"
            raise BudgetError("kv_settle_tokens", settle, accepted)
        if settle and policy.no_settling_reason:
            raise BudgetError("kv_settle_tokens", settle, f"0 {policy.no_settling_reason}")
        if prefill and not policy.may_bound:
            why = "which has nothing to rank by before the prompt's end"
            raise BudgetError(
                "kv_prefill_tokens", prefill, f"0 with kv_policy {policy.name}, {why}"
            )
        if heads == "shared" and self.equal_heads_reason:
            raise BudgetError(
                "kv_heads", heads, f"equal on this server ({self.equal_heads_reason})"
            )
        if heads == "shared" and policy.equal_heads_reason:
            accepted = f"equal with kv_policy {policy.name}, {policy.equal_heads_reason}"
            raise BudgetError("kv_heads", heads, accepted)
        if evicts and policy.needs_scores and self.no_scores_reason:
            accepted = (
                f"one that collects no attention on this server ({self.no_scores_reason}); 'later', "
                "'window' and 'random' collect none"
            )
            raise BudgetError("kv_policy", policy.name, accepted)


@dataclass(frozen=True)
class Settings(EngineLimits):
    """The settings of a server, one attribute per row.

    A row that is ``per_request`` is also a field of a request; the value here is its default.
    """

    kv_budget: float = setting(
        1.0,
        "Share of its tokens, prompt and answer, that a request keeps; 0.2 is kvpress' compression_ratio "
        "0.8.",
        per_request=True, high=1, low_open=True,
    )  # fmt: skip
    kv_budget_tokens: int | None = setting(
        None, "Number of tokens that a request keeps, in place of a share.",
        per_request=True, low=1, metavar="N",
        excludes={
            "kv_budget": "they are two ways to say how much is kept",
            "kv_settle_tokens": "segments keep a share of their tokens, which kv_budget gives",
        },
    )  # fmt: skip
    kv_recent: float | None = setting(
        None,
        "Share of the budget for the newest tokens. Default: set by the policy; larger if the prompt's "
        "end is protected.",
        per_request=True, high=1, attribute="recent", reported="recent", says_how=True, settling_ignores=True,
    )  # fmt: skip
    kv_policy: str = setting(
        "auto",
        "How the other tokens to keep are chosen. "
        + "; ".join(f"{preset.name}: {preset.use}" for preset in PRESETS)
        + f". Or one or more ranks, joined by +: {'+'.join(joinable_ranks(calibrated=True))}.",
        per_request=True, metavar="POLICY", attribute="policy", reported="policy", says_how=True,
    )  # fmt: skip
    kv_heads: str | None = setting(
        None,
        "equal: all KV heads of a layer keep equally many tokens; shared: they divide the layer's slots "
        "by need. Default: set by the policy.",
        per_request=True, words=HEADS, attribute="heads", reported="heads", says_how=True, off=HEADS[0],
        excludes={"kv_settle_tokens": "each head has its own slots in settled segments"},
    )  # fmt: skip
    kv_protect: int | str | None = setting(
        None,
        "First tokens that are never evicted and do not count in the budget: a number; the whole prompt; a "
        "chat's system messages; these and the first user message (task); or the first block and, "
        "within the budget, the prompt's end, where a question stands (ends). Default: set by the policy, "
        "usually ends.",
        per_request=True, words=PROTECT_WORDS, metavar="N|prompt|system|task|ends", attribute="protect",
        says_how=True, excluding=("ends",),
        excludes={"kv_settle_tokens": "segments settle wherever the prompt ends"},
    )  # fmt: skip
    kv_delay: int = setting(
        16,
        "Number of generated tokens before the first eviction; until then nothing is lost.",
        per_request=True, high=MAX_DELAY, attribute="delay", reported="delay", says_how=True,
        settling_ignores=True,
    )  # fmt: skip
    kv_elastic: bool = setting(
        False,
        "Evict only when the KV cache is full.",
        per_request=True, attribute="elastic", reported="elastic", says_how=True,
        excludes={
            "kv_evict_from": "free memory decides when evictions begin",
            "kv_settle_tokens": "segments settle whether or not memory is short",
        },
    )  # fmt: skip
    kv_prefill_tokens: int = setting(
        0,
        "Most unprotected tokens that a prompt holds while it is computed. 0: no limit.",
        per_request=True, attribute="prefill", reported="prefill_tokens", says_how=True,
        excludes={"kv_settle_tokens": "settling already limits a prompt while it is computed"},
    )  # fmt: skip
    kv_settle_tokens: int = setting(
        0,
        "Number of newest tokens that are all kept; older ones are evicted down to kv_budget in segments, "
        "which later requests reuse. 0: off.",
        per_request=True, attribute="settle", reported="settle_tokens", says_how=True,
    )  # fmt: skip
    kv_exact: bool = setting(
        False,
        "Keep all tokens: draft with kv_budget of them, and verify the drafts with all.",
        per_request=True, attribute="exact", reported="exact",
    )  # fmt: skip
    kv_exact_drafts: int = setting(
        0,
        "Number of tokens drafted at once for requests with kv_exact. 0: 4 with --kv-exact, otherwise such "
        "requests are refused.",
        high=MOST_DRAFTS, metavar="N",
    )  # fmt: skip
    kv_budget_min: float = setting(
        0.01,
        "Smallest kv_budget that a request may ask for.",
        high=1,
        low_open=True,
    )
    kv_budget_max: float = setting(
        1.0,
        "Largest kv_budget that a request may ask for.",
        high=1,
        low_open=True,
    )
    kv_min_tokens: int = setting(
        128,
        "Smallest budget of a request, in tokens. A prompt is short if it has at most four times as many.",
        low=1,
        metavar="N",
    )
    kv_protect_max: int | None = setting(
        None,
        "Most tokens that a request may protect. Default: its whole prompt, or 1024 if --kv-budget-max is "
        "below 1.",
        metavar="N",
    )
    kv_elastic_admission: str = setting(
        "squeeze",
        "When a new prompt needs memory: squeeze evicts tokens of elastic requests; queue lets the prompt "
        "wait.",
        words=ADMISSIONS,
    )
    kv_turn_seconds: float = setting(
        0.2,
        "Seconds for which the settled blocks of an answer are kept for the chat's next turn while other "
        "requests wait. 0: they are not kept.",
        high=60, metavar="S",
    )  # fmt: skip
    kv_full_kernel: str = setting(
        "auto",
        "Attention kernel on CPUs for requests that evict nothing. auto: h2o with AMX, otherwise vllm.",
        words=FULL_KERNELS,
    )
    kv_trace: bool = setting(False, "Let requests ask, with kv_trace, which tokens were kept.")
    kv_calibration: str | None = setting(
        None,
        "Calibration of the model, written by python -m h2o_vllm.calibrate; the rank predicted needs it. "
        "Default: the embedded model's own, or none.",
        metavar="FILE",
    )


OPTIONS = rows_of(Settings)
"""The rows of the table: a server's options."""

REQUEST_ONLY = (
    Field(
        "Evict nothing before the request has this many tokens. Inside the prompt: evict there, and compute "
        "the rest of the prompt on what is kept, so that its prompt_logprobs show what evictions cost.",
        name="kv_evict_from", per_request=True, kind=int, optional=True, low=1, says_how=True,
        excludes={"kv_settle_tokens": "segments settle where they end"},
    ),
    Field(
        "Report which tokens each layer and KV head holds. The server needs --kv-trace.",
        name="kv_trace", per_request=True, kind=bool, default=False,
        excludes={
            "kv_settle_tokens": "a trace cannot follow tokens that several requests share",
            "kv_exact": "an exact request loses no token",
        },
    ),
)  # fmt: skip
"""Request fields for tests and diagnosis; a server has no defaults for them."""

FIELDS = {row.name: row for row in (*OPTIONS, *REQUEST_ONLY) if row.per_request}
"""The request fields, by name."""

REQUEST_FIELDS = tuple(FIELDS)
"""Their names, accepted at the top level of a body and inside ``vllm_xargs``."""


def excluding(name: str, given: Mapping[str, Any]) -> tuple[str, str] | None:
    """A field in ``given`` that excludes ``name``, and the reason; ``None`` if no field excludes it."""
    for other, value in given.items():
        row = FIELDS[other]
        if name in row.excludes and (value in row.excluding if row.excluding else row.is_on(value)):
            return " ".join([other, *row.excluding]), row.excludes[name]
    return None


def check_exclusions(given: Mapping[str, Any]) -> None:
    """Check that no request field in ``given`` excludes another.

    Raises:
        ConflictError: one does; the error names both and the reason.
    """
    for name, value in given.items():
        if FIELDS[name].is_on(value) and (found := excluding(name, given)):
            raise ConflictError(name, value, f"left out with {found[0]}: {found[1]}")
