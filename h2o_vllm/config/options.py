# SPDX-License-Identifier: Apache-2.0
"""A server's settings: what requests get that name nothing, and the limits of what they may name.

Runs in every process; imports :mod:`h2o_vllm.checks`, :mod:`h2o_vllm.errors`, the request fields and the
policies' names. What a request makes of it: :mod:`h2o_vllm.config.resolve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from h2o_vllm.checks import MAX_TOKENS, check_choice, check_flag, check_fraction, check_integer
from h2o_vllm.config.policies import (
    BOUNDED_POLICY,
    CALIBRATED_POLICY,
    DEFAULT_POLICY,
    EQUAL_HEADS_POLICIES,
    POLICIES,
    RECENT_SHARES,
    ZAP_POLICIES,
)
from h2o_vllm.config.request_fields import (
    MAX_DELAY,
    MAX_SINKS,
    check_heads,
    check_policy,
    check_prefill,
    check_protect,
)
from h2o_vllm.errors import BudgetError, ConfigError

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
        kv_policy: default policy, one of :data:`~h2o_vllm.config.policies.POLICIES`; ``None``: see
            :meth:`default_policy_of`. ``h2o`` is the paper's.
        kv_sinks: default number of first tokens that are never evicted, 0 to 1024.
        kv_budget_min: smallest ``kv_budget`` a request may ask for.
        kv_budget_max: largest ``kv_budget`` a request may ask for.
        kv_min_tokens: no budget falls below this many tokens; short sequences stay whole.
        kv_protect: default number of first tokens that a budget leaves alone, or one of
            :data:`~h2o_vllm.config.request_fields.PROTECT_WORDS`. A default protects at most
            ``kv_protect_max`` tokens of a longer prompt; a request that asks for more is refused.
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
            for one of :data:`~h2o_vllm.config.policies.ZAP_POLICIES`. For CPUs.
        kv_full_kernel: one of :data:`FULL_KERNELS`. ``h2o`` is for CPUs, and nothing is lost with it: the
            same attention, rounded differently. ``auto`` is ``h2o`` where vLLM would use its kernel for AMX,
            whose KV only that one reads, and ``vllm`` elsewhere.
        kv_heads: one of :data:`~h2o_vllm.config.request_fields.HEADS`; ``None``: see :meth:`heads_of`. A
            request with one of :data:`~h2o_vllm.config.policies.EQUAL_HEADS_POLICIES` that does not name it
            has ``equal``.
        kv_heads_equal_because: why heads cannot share in this engine; empty: they can. No option: who knows
            the engine says it, see :func:`h2o_vllm.engine.support.config_of`.

    Raises:
        ConfigError: a value is out of range, or the defaults violate the limits.
    """

    kv_budget: float = 1.0
    kv_budget_tokens: int | None = None
    kv_recent: float | None = None
    kv_policy: str | None = None
    kv_sinks: int = 0
    kv_budget_min: float = 0.01
    kv_budget_max: float = 1.0
    kv_min_tokens: int = 128
    kv_protect: int | str = 0
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
        check_policy(self.default_policy, POLICIES)
        check_integer("kv_sinks", self.kv_sinks, 0, MAX_SINKS)
        if self.kv_budget_tokens is not None:
            check_integer("kv_budget_tokens", self.kv_budget_tokens)
        check_integer("kv_min_tokens", self.kv_min_tokens)
        if self.kv_protect_max is not None:
            check_integer("kv_protect_max", self.kv_protect_max, 0)
        check_protect(self.kv_protect, MAX_TOKENS)
        check_integer("kv_delay", self.kv_delay, 0, MAX_DELAY)
        check_flag("kv_elastic", self.kv_elastic)
        check_choice("kv_elastic_admission", self.kv_elastic_admission, ADMISSIONS)
        check_prefill(self.kv_prefill_tokens, self.default_policy)
        check_flag("kv_trace", self.kv_trace)
        if self.kv_calibration is not None and not isinstance(self.kv_calibration, str):
            raise BudgetError("kv_calibration", self.kv_calibration, "the path of a file")
        check_choice("kv_full_kernel", self.kv_full_kernel, FULL_KERNELS)
        if self.kv_heads is not None:
            check_heads(self.kv_heads, self.default_policy, self.kv_heads_equal_because)

    def _check_limits(self) -> None:
        """The limits are in order, and who names no budget keeps to them."""
        low, high = self.kv_budget_min, self.kv_budget_max
        if low > high:
            raise ConfigError(f"--kv-budget-min {low} is larger than --kv-budget-max {high}")
        if self.kv_budget_tokens is not None:
            # Bounded by the limits when it is used, as it depends on the tokens seen.
            return
        if self.default_policy == "full":
            default, flag = 1.0, "--kv-policy full"
        else:
            default, flag = self.kv_budget, f"--kv-budget {self.kv_budget}"
        if not low <= default <= high:
            raise ConfigError(
                f"{flag} lies outside of --kv-budget-min {low} .. --kv-budget-max {high}: "
                "requests that name no budget would be refused"
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
            raise ConfigError(f"unknown h2o option(s) {', '.join(unknown)}; known: {sorted(known)}")
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The inverse of :meth:`from_mapping`: plain values that survive JSON and pickling."""
        return asdict(self)

    @property
    def default_policy(self) -> str:
        """One of :data:`POLICIES`: that of a request that names nothing."""
        return self.default_policy_of(bounded=bool(self.kv_prefill_tokens))

    def default_policy_of(self, *, bounded: bool) -> str:
        """That of a request that names no policy, its prompt bounded while it is computed or not."""
        if self.kv_policy is not None:
            return self.kv_policy
        if self.kv_calibration is None:
            return DEFAULT_POLICY
        return BOUNDED_POLICY if bounded else CALIBRATED_POLICY

    @property
    def policies(self) -> tuple[str, ...]:
        """The :data:`~h2o_vllm.config.policies.POLICIES` that requests may ask for, ``full`` last."""
        missing = () if self.kv_calibration else ZAP_POLICIES
        return tuple(name for name in POLICIES if name not in missing)

    def recent_of(self, policy: str) -> float:
        """Share of the newest tokens if a request does not say: the policy's, unless this server has one."""
        return RECENT_SHARES.get(policy, 0.5) if self.kv_recent is None else self.kv_recent

    def heads_of(self, policy: str) -> str:
        """Who shares slots if a request does not say: nobody, unless this server does.

        What predicted scores find lies in few heads: with equal ones half of it would go.
        """
        if self.kv_heads_equal_because or policy in EQUAL_HEADS_POLICIES:
            return "equal"
        if self.kv_heads is not None:
            return self.kv_heads
        return "shared" if policy in ZAP_POLICIES else "equal"

    @property
    def protect_limit(self) -> int | None:
        """Most tokens that a request may protect; ``None``: its whole prompt.

        Who bounds budgets and says nothing of protection does not expect prompts to stay whole: few tokens
        then, as with sinks, unless the default protects more.
        """
        if self.kv_protect_max is not None:
            return self.kv_protect_max
        if self.kv_budget_max == 1.0 or isinstance(self.kv_protect, str):
            return None
        return max(MAX_SINKS, self.kv_protect)
