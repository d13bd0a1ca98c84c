# SPDX-License-Identifier: Apache-2.0
"""The settings of a server, parsed and checked, and values that follow from several of them.

Runs in every process; imports :mod:`h2o_vllm.errors`, the policies and its siblings.
:mod:`h2o_vllm.config.settings` has the rows, :mod:`h2o_vllm.config.resolve` applies them to a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from h2o_vllm.config.request_fields import FEW_PROTECTED, ROLE_WORDS, SHORT_PROMPT
from h2o_vllm.config.settings import FIELDS, OPTIONS, Settings, check_exclusions, excluding
from h2o_vllm.errors import BudgetError, ConfigError
from h2o_vllm.policy.policy import Policy, accepted_policies


@dataclass(frozen=True)
class H2OConfig(Settings):
    """Server-wide defaults and operator limits.

    Raises:
        ConfigError: a value is out of range, or the defaults violate the limits.
    """

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
        for row in OPTIONS:
            value = getattr(self, row.name)
            if value is not None or not row.optional:
                row.check(value)
        named = {row.name: getattr(self, row.name) for row in OPTIONS if row.per_request}
        # A server always has kv_budget; kv_budget_tokens overrides it.
        check_exclusions({name: value for name, value in named.items() if name != "kv_budget"})
        self.check_policy(
            self.default_policy,
            settle=self.kv_settle_tokens,
            prefill=self.kv_prefill_tokens,
            heads=self.kv_heads,
            evicts=self.evicts_by_default or self.kv_prefill_tokens > 0,
        )

    def _check_limits(self) -> None:
        """Check that lower limits are below upper ones, and that the default budget lies within them."""
        low, high = self.kv_budget_min, self.kv_budget_max
        if self.exact_drafts and high < 1.0:
            raise ConfigError(
                f"--kv-exact and --kv-exact-drafts need --kv-budget-max 1, got {high}: exact requests keep "
                "all KV"
            )
        if low > high:
            raise ConfigError(f"--kv-budget-min {low} is larger than --kv-budget-max {high}")
        if self.kv_budget_tokens is not None:
            # Its share depends on the tokens seen, so the limits apply when it is used.
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
        known = {row.name for row in OPTIONS}
        if unknown := sorted(set(values) - known):
            names = ", ".join(unknown)
            raise ConfigError(f"unknown h2o option(s) {names}; known: {sorted(known)}")
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The inverse of :meth:`from_mapping`: plain values that survive JSON and pickling."""
        return {row.name: getattr(self, row.name) for row in OPTIONS}

    @property
    def calibrated(self) -> bool:
        """Whether policies may use a calibration."""
        return self.kv_calibration is not None

    @property
    def evicts_by_default(self) -> bool:
        """Whether a request without budget fields evicts."""
        return self.kv_budget < 1.0 or self.kv_budget_tokens is not None

    @property
    def accepts(self) -> dict[str, bool]:
        """Arguments of :func:`.joinable_ranks`: which policies a request may name."""
        return {"calibrated": self.calibrated, "scored": not self.no_scores_reason}

    @property
    def exact_drafts(self) -> int:
        """Tokens drafted at once for exact requests; 0: they are refused."""
        return self.kv_exact_drafts or (4 if self.kv_exact else 0)

    @property
    def default_policy(self) -> Policy:
        """The policy of a request that names none."""
        return self.parsed(self.kv_policy, self.kv_prefill_tokens, self.kv_settle_tokens)

    def parsed(self, policy: Any, prefill: Any, settle: Any, *, calibrated: bool = False) -> Policy:
        """The policy for a value of ``kv_policy``, given ``kv_prefill_tokens`` and ``kv_settle_tokens``.

        Args:
            calibrated: whether to assume a calibration.

        Raises:
            BudgetError: it names no policy.
        """
        return Policy.parse(
            policy,
            calibrated=calibrated or self.calibrated,
            bounded=bool(prefill),
            scored=not (settle or self.no_scores_reason),
        )

    def policy_of(self, asked: Any, prefill: Any, settle: Any) -> Policy:
        """The policy that a request asks for, the default if ``asked`` is ``None``; see :meth:`parsed`.

        Raises:
            BudgetError: it names no policy, or one that needs a calibration, and the server has none.
        """
        text = self.kv_policy if asked is None else asked
        policy = self.parsed(text, prefill, settle)
        if policy.calibrated and not self.calibrated:
            accepted = accepted_policies(calibrated=False)
            raise BudgetError(
                "kv_policy", text, f"{accepted} on this server (started without --kv-calibration)"
            )
        return policy

    def recent_of(self, policy: Policy, *, answers: bool = False) -> float:
        """Default of ``kv_recent``: the server's option, otherwise the value of the policy.

        Args:
            answers: whether the prompt's end is protected.
        """
        if self.kv_recent is not None:
            return self.kv_recent
        return policy.recent_of_answers if answers else policy.recent

    def heads_of(self, policy: Policy) -> str:
        """Default of ``kv_heads``: the server's option, otherwise the policy's, if sharing is fast."""
        if self.equal_heads_reason or policy.equal_heads_reason:
            return "equal"
        if self.kv_heads is not None:
            return self.kv_heads
        return "shared" if policy.shares and not self.shared_heads_slow else "equal"

    def defaults(self, policy: Policy, settle: int) -> dict[str, Any]:
        """The defaults of a request with ``policy``, by field.

        A field that the request ignores is ``None``, such as ``kv_delay`` if segments settle.

        Args:
            settle: ``kv_settle_tokens`` of the request. If not 0, the defaults that it excludes are off.
        """
        values = {row.name: getattr(self, row.name) for row in OPTIONS if row.per_request} | {
            "kv_policy": policy.name,
            "kv_recent": self.recent_of(policy),
            "kv_protect": policy.protect if self.kv_protect is None else self.kv_protect,
            "kv_heads": self.heads_of(policy),
            "kv_settle_tokens": settle,
        }
        if settle:
            if values["kv_protect"] == "ends":
                # Segments are found again only after the same protected tokens; the prompt of a chat grows.
                values["kv_protect"] = 0
            for name in values:
                row = FIELDS[name]
                if (
                    excluding("kv_settle_tokens", {name: values[name]})
                    and name != "kv_budget_tokens"
                ):
                    values[name] = row.off if row.off is not None else row.kind()
                elif row.settling_ignores:
                    values[name] = None
        return values

    @property
    def applied(self) -> dict[str, Any]:
        """The values for a request without budget fields, by field; shown to people and in OpenAPI."""
        return self.defaults(self.default_policy, self.kv_settle_tokens)

    def range_of(self, name: str) -> tuple[float | None, float | None]:
        """The range of a request field on this server, low and high; ``None``: the limit of its row."""
        if name == "kv_budget":
            return self.kv_budget_min, self.kv_budget_max
        return None, self.protect_limit if name == "kv_protect" else None

    @property
    def protect_limit(self) -> int | None:
        """Most tokens that a request may protect; ``None``: its whole prompt.

        If a server limits budgets and does not set ``--kv-protect-max``, a request may protect only
        :data:`.FEW_PROTECTED` tokens, or the default if that is more.
        """
        if self.kv_protect_max is not None:
            return self.kv_protect_max
        if self.kv_budget_max == 1.0 or self.kv_protect in ("prompt", *ROLE_WORDS):
            return None
        return max(FEW_PROTECTED, self.kv_protect if isinstance(self.kv_protect, int) else 0)

    @property
    def short_prompt(self) -> int:
        """Most tokens of a prompt that ``kv_protect`` ``"ends"`` protects whole."""
        short = SHORT_PROMPT * self.kv_min_tokens
        return short if self.protect_limit is None else min(short, self.protect_limit)
