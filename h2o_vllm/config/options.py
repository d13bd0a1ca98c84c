# SPDX-License-Identifier: Apache-2.0
"""A server's settings: what requests get that name nothing, and the limits of what they may name.

Runs in every process; imports :mod:`h2o_vllm.checks`, :mod:`h2o_vllm.errors`, the request fields and the
policies. What a request makes of it: :mod:`h2o_vllm.config.resolve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from h2o_vllm.checks import MAX_TOKENS, check_choice, check_flag, check_fraction, check_integer
from h2o_vllm.config.request_fields import (
    FEW_PROTECTED,
    MAX_DELAY,
    REMOVED_FIELDS,
    check_heads,
    check_prefill,
    check_protect,
)
from h2o_vllm.errors import BudgetError, ConfigError
from h2o_vllm.policy.policy import Policy, accepted_policies

__all__ = ["ADMISSIONS", "FULL_KERNELS", "H2OConfig"]

ADMISSIONS = ("squeeze", "queue")
"""What ``--kv-elastic-admission`` may be: elastic requests yield to waiting prompts as well, or only where
a request would be preempted."""

FULL_KERNELS = ("auto", "vllm", "h2o")
"""What ``--kv-full-kernel`` may be: whose attention kernel serves rows that collect no scores, on a CPU."""


@dataclass(frozen=True)
class H2OConfig:
    """Server-wide defaults and operator limits.

    Attributes:
        kv_budget: default share of the seen tokens a request keeps, in (0, 1]; 1 is lossless.
        kv_budget_tokens: default absolute budget; overrides ``kv_budget`` when set.
        kv_recent: default share of a budget spent on the newest tokens, in [0, 1]; ``None``: see
            :meth:`recent_of`.
        kv_policy: default policy, see :meth:`.Policy.parse`. ``h2o`` is the paper's.
        kv_budget_min: smallest ``kv_budget`` a request may ask for.
        kv_budget_max: largest ``kv_budget`` a request may ask for.
        kv_min_tokens: no budget falls below this many tokens; short sequences stay whole.
        kv_protect: default number of first tokens that a budget leaves alone, or one of
            :data:`~h2o_vllm.config.request_fields.PROTECT_WORDS`; ``None``: the policy's, mostly 0. A
            default protects at most ``kv_protect_max`` tokens of a longer prompt; a request that asks for
            more is refused.
        kv_protect_max: most tokens a request may protect; ``None``: see :attr:`protect_limit`. They come
            on top of ``kv_budget_max``.
        kv_delay: default number of generated tokens before a request's first eviction, 0 to 256: until then
            an answer is lossless, and its queries have their say in what stays. The paper evicts at once (0).
        kv_elastic: whether requests keep everything until memory is short, their budgets being floors.
        kv_elastic_admission: one of :data:`ADMISSIONS`.
        kv_prefill_tokens: default number of unprotected tokens that a prompt may hold while it is computed;
            0: all it has. Raised to four blocks and twice ``kv_min_tokens``.
        kv_trace: whether requests may ask for a trace, see :mod:`h2o_vllm.blocks.trace`.
        kv_calibration: file that :mod:`h2o_vllm.calibrate` has made of this model; ``None``: nobody may ask
            for a policy that needs one. For CPUs.
        kv_full_kernel: one of :data:`FULL_KERNELS`. ``h2o`` is for CPUs, and nothing is lost with it: the
            same attention, rounded differently. ``auto`` is ``h2o`` where vLLM would use its kernel for AMX,
            whose KV only that one reads, and ``vllm`` elsewhere.
        kv_heads: one of :data:`~h2o_vllm.config.request_fields.HEADS`; ``None``: see :meth:`heads_of`. A
            request whose policy cannot share and that does not name it has ``equal``.
        kv_heads_equal_because: why heads cannot share in this engine; empty: they can. No option: who knows
            the engine says it, see :func:`h2o_vllm.engine.support.config_of`.

    Raises:
        ConfigError: a value is out of range, or the defaults violate the limits.
    """

    kv_budget: float = 1.0
    kv_budget_tokens: int | None = None
    kv_recent: float | None = None
    kv_policy: str = "auto"
    kv_budget_min: float = 0.01
    kv_budget_max: float = 1.0
    kv_min_tokens: int = 128
    kv_protect: int | str | None = None
    kv_protect_max: int | None = None
    kv_delay: int = 16
    kv_elastic: bool = False
    kv_elastic_admission: str = "squeeze"
    kv_prefill_tokens: int = 0
    kv_trace: bool = False
    kv_calibration: str | None = None
    kv_full_kernel: str = "auto"
    kv_heads: str | None = None
    kv_heads_equal_because: str = ""

    def __post_init__(self) -> None:
        try:
            self._check_values()
        except BudgetError as error:
            raise ConfigError(f"--{error.parameter.replace('_', '-')}: {error}") from None
        limit = self.kv_protect_max
        if limit is not None and isinstance(self.kv_protect, int) and self.kv_protect > limit:
            raise ConfigError(
                f"--kv-protect {self.kv_protect} is larger than --kv-protect-max {limit}"
            )
        self._check_limits()

    def _check_values(self) -> None:
        for name in ("kv_budget", "kv_budget_min", "kv_budget_max"):
            check_fraction(name, getattr(self, name), 0.0, 1.0, low_open=True)
        if self.kv_recent is not None:
            check_fraction("kv_recent", self.kv_recent, 0.0, 1.0)
        default = self.default_policy
        if self.kv_budget_tokens is not None:
            check_integer("kv_budget_tokens", self.kv_budget_tokens)
        check_integer("kv_min_tokens", self.kv_min_tokens)
        if self.kv_protect_max is not None:
            check_integer("kv_protect_max", self.kv_protect_max, 0)
        if self.kv_protect is not None:
            check_protect(self.kv_protect, MAX_TOKENS)
        check_integer("kv_delay", self.kv_delay, 0, MAX_DELAY)
        check_flag("kv_elastic", self.kv_elastic)
        check_choice("kv_elastic_admission", self.kv_elastic_admission, ADMISSIONS)
        check_prefill(self.kv_prefill_tokens, default)
        check_flag("kv_trace", self.kv_trace)
        if self.kv_calibration is not None and not isinstance(self.kv_calibration, str):
            raise BudgetError("kv_calibration", self.kv_calibration, "the path of a file")
        check_choice("kv_full_kernel", self.kv_full_kernel, FULL_KERNELS)
        if self.kv_heads is not None:
            check_heads(self.kv_heads, default, self.kv_heads_equal_because)

    def _check_limits(self) -> None:
        """The limits are in order, and who names no budget keeps to them."""
        low, high = self.kv_budget_min, self.kv_budget_max
        if low > high:
            raise ConfigError(f"--kv-budget-min {low} is larger than --kv-budget-max {high}")
        if self.kv_budget_tokens is not None:
            # Bounded by the limits when it is used, as it depends on the tokens seen.
            return
        if not low <= self.kv_budget <= high:
            raise ConfigError(
                f"--kv-budget {self.kv_budget} lies outside of --kv-budget-min {low} .. --kv-budget-max "
                f"{high}: requests that name no budget would be refused"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> H2OConfig:
        """Parse ``additional_config["h2o"]``.

        Raises:
            ConfigError: an unknown key, or a value out of range.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            removed = [
                f"{name}: {REMOVED_FIELDS[name]}" for name in unknown if name in REMOVED_FIELDS
            ]
            hint = "; ".join(removed) or f"known: {sorted(known)}"
            raise ConfigError(f"unknown h2o option(s) {', '.join(unknown)}; {hint}")
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The inverse of :meth:`from_mapping`: plain values that survive JSON and pickling."""
        return asdict(self)

    @property
    def calibrated(self) -> bool:
        """Whether policies may use a calibration."""
        return self.kv_calibration is not None

    @property
    def default_policy(self) -> Policy:
        """That of a request that names nothing."""
        bounded = bool(self.kv_prefill_tokens)
        return Policy.parse(self.kv_policy, calibrated=self.calibrated, bounded=bounded)

    def policy_of(self, asked: Any, *, bounded: bool) -> Policy:
        """What a request asks for, or the default if that is ``None``; its prompt may be bounded.

        Raises:
            BudgetError: it names none, or one that needs a calibration where there is none.
        """
        text = self.kv_policy if asked is None else asked
        policy = Policy.parse(text, calibrated=self.calibrated, bounded=bounded)
        if policy.calibrated and not self.calibrated:
            accepted = accepted_policies(calibrated=False)
            raise BudgetError(
                "kv_policy", text, f"{accepted} on this server (started without --kv-calibration)"
            )
        return policy

    def recent_of(self, policy: Policy) -> float:
        """Share of the newest tokens if a request does not say: the policy's, unless this server has one."""
        return policy.recent if self.kv_recent is None else self.kv_recent

    def protect_of(self, policy: Policy) -> int | str:
        """What is protected if a request does not say: what the policy protects, unless this server says."""
        return policy.protect if self.kv_protect is None else self.kv_protect

    def heads_of(self, policy: Policy) -> str:
        """Who shares slots if a request does not say: as the policy has it, unless this server says."""
        if self.kv_heads_equal_because or policy.equal_because:
            return "equal"
        if self.kv_heads is not None:
            return self.kv_heads
        return "shared" if policy.shares else "equal"

    @property
    def protect_limit(self) -> int | None:
        """Most tokens that a request may protect; ``None``: its whole prompt.

        Who bounds budgets and says nothing of protection does not expect prompts to stay whole: few tokens
        then, unless the default protects more.
        """
        if self.kv_protect_max is not None:
            return self.kv_protect_max
        if self.kv_budget_max == 1.0 or isinstance(self.kv_protect, str):
            return None
        return max(FEW_PROTECTED, self.kv_protect or 0)
