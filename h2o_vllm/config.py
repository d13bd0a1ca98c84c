# SPDX-License-Identifier: Apache-2.0
"""What an operator configures and what a request may ask for.

Runs in every process; imports only :mod:`h2o_vllm.errors`. This is the only file that knows the
names of the request fields and of the keys in vLLM's ``additional_config["h2o"]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from h2o_vllm.errors import BudgetError, ConfigError

__all__ = [
    "CONFIG_KEY",
    "MAX_SINKS",
    "METRICS_KEY",
    "POLICIES",
    "REPORT_KEY",
    "REQUEST_FIELDS",
    "H2OConfig",
    "RequestBudget",
]

CONFIG_KEY = "h2o"
"""Key of our part of vLLM's ``additional_config``."""

METRICS_KEY = "h2o_metrics"
"""Key of ``additional_config`` by which a server says that it reads what our scheduler sends: it takes our
counts out of vLLM's scheduler stats, and completes reports. In ``SchedulerStats.kv_connector_stats`` the
key of those counts."""

REPORT_KEY = "h2o"
"""Key of our reports inside an output's ``kv_transfer_params``: choice index -> report, or, if a server reads
them and the request may go on, the values to make one of; see :mod:`h2o_vllm.blocks.report`."""

POLICIES = ("h2o", "h2o-norm", "caote", "snapkv", "tova", "keydiff", "window", "random", "full")
"""Names accepted as ``kv_policy``, ``full`` last; see :mod:`h2o_vllm.policy`."""

REQUEST_FIELDS = ("kv_budget", "kv_budget_tokens", "kv_recent", "kv_policy", "kv_sinks")
"""Request fields, accepted at the top level of a body and inside ``vllm_xargs``."""

MAX_BUDGET_TOKENS = 2**31 - 1

MAX_SINKS = 1024
"""Protected first tokens come on top of an operator's ``kv_budget_max``, so they are few."""


@dataclass(frozen=True)
class RequestBudget:
    """What one request may keep. Built by :meth:`H2OConfig.resolve`, never by hand.

    Attributes:
        fraction: share of the tokens seen so far (prompt + generated) to keep, in (0, 1].
        tokens: absolute number of tokens to keep, or ``None`` if ``fraction`` rules.
        min_fraction, max_fraction: operator limits; they bound ``tokens`` as well.
        floor: budgets never fall below this many tokens.
        recent: share of the budget given to the newest tokens, in [0, 1].
        sinks: first tokens that are never evicted; no budget falls below them.
        policy: one of :data:`POLICIES`.
    """

    fraction: float
    tokens: int | None
    min_fraction: float
    max_fraction: float
    floor: int
    recent: float
    policy: str
    sinks: int = 0

    @property
    def evicts(self) -> bool:
        """Whether this request can ever give up a token. If not, it is served by stock vLLM."""
        return self.policy != "full" and (self.tokens is not None or self.fraction < 1.0)


@dataclass(frozen=True)
class H2OConfig:
    """Server-wide defaults and operator limits.

    Attributes:
        kv_budget: default share of the seen tokens a request keeps, in (0, 1]; 1 is lossless.
        kv_budget_tokens: default absolute budget; overrides ``kv_budget`` when set.
        kv_recent: default share of a budget spent on the newest tokens, in [0, 1].
        kv_policy: default policy, one of :data:`POLICIES`.
        kv_sinks: default number of first tokens that are never evicted, 0 to 1024.
        kv_budget_min: smallest ``kv_budget`` a request may ask for.
        kv_budget_max: largest ``kv_budget`` a request may ask for.
        kv_min_tokens: no budget falls below this many tokens; short sequences stay whole.

    Raises:
        ConfigError: a value is out of range, or the defaults violate the limits.
    """

    kv_budget: float = 1.0
    kv_budget_tokens: int | None = None
    kv_recent: float = 0.5
    kv_policy: str = "h2o"
    kv_sinks: int = 0
    kv_budget_min: float = 0.01
    kv_budget_max: float = 1.0
    kv_min_tokens: int = 128

    def __post_init__(self) -> None:
        try:
            for name in ("kv_budget", "kv_budget_min", "kv_budget_max"):
                _fraction(name, getattr(self, name), 0.0, 1.0, low_open=True)
            _fraction("kv_recent", self.kv_recent, 0.0, 1.0)
            _choice("kv_policy", self.kv_policy)
            _integer("kv_sinks", self.kv_sinks, 0, MAX_SINKS)
            if self.kv_budget_tokens is not None:
                _integer("kv_budget_tokens", self.kv_budget_tokens)
            _integer("kv_min_tokens", self.kv_min_tokens)
        except BudgetError as error:
            raise ConfigError(f"--{error.parameter.replace('_', '-')}: {error}") from None
        if self.kv_budget_min > self.kv_budget_max:
            raise ConfigError(
                f"--kv-budget-min {self.kv_budget_min} is larger than --kv-budget-max "
                f"{self.kv_budget_max}"
            )
        if self.kv_budget_tokens is None and self.kv_policy != "full":
            default, flag = self.kv_budget, f"--kv-budget {self.kv_budget}"
        elif self.kv_budget_tokens is None:
            default, flag = 1.0, "--kv-policy full"
        else:
            return
        if not self.kv_budget_min <= default <= self.kv_budget_max:
            raise ConfigError(
                f"{flag} lies outside of --kv-budget-min {self.kv_budget_min} .. "
                f"--kv-budget-max {self.kv_budget_max}: requests that name no budget would be refused"
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

    def resolve(self, asked: Mapping[str, Any] | None) -> RequestBudget:
        """Turn what a request asked for into its budget, filling in the defaults.

        Args:
            asked: a mapping that may hold any of :data:`REQUEST_FIELDS`; other keys are ignored.

        Raises:
            BudgetError: a field has the wrong type, is out of range, or contradicts another.
        """
        given = {k: asked[k] for k in REQUEST_FIELDS if asked and asked.get(k) is not None}
        policy = _choice("kv_policy", given.get("kv_policy", self.kv_policy))
        recent = _fraction("kv_recent", given.get("kv_recent", self.kv_recent), 0.0, 1.0)
        sinks = _integer("kv_sinks", given.get("kv_sinks", self.kv_sinks), 0, MAX_SINKS)
        if "kv_budget" in given and "kv_budget_tokens" in given:
            raise BudgetError(
                "kv_budget", given["kv_budget"], "left out when kv_budget_tokens is given"
            )
        fraction, tokens = self.kv_budget, self.kv_budget_tokens
        if "kv_budget" in given:
            low, high = self.kv_budget_min, self.kv_budget_max
            fraction, tokens = _fraction("kv_budget", given["kv_budget"], low, high), None
        elif "kv_budget_tokens" in given:
            tokens = _integer("kv_budget_tokens", given["kv_budget_tokens"])
        if policy == "full":
            if self.kv_budget_max < 1.0:
                raise BudgetError(
                    "kv_policy",
                    policy,
                    f"one of {', '.join(POLICIES[:-1])} on this server "
                    f"(its kv_budget_max is {self.kv_budget_max})",
                )
            fraction, tokens = 1.0, None
        return RequestBudget(
            fraction=fraction,
            tokens=tokens,
            min_fraction=self.kv_budget_min,
            max_fraction=self.kv_budget_max,
            floor=self.kv_min_tokens,
            recent=recent,
            policy=policy,
            sinks=sinks,
        )


def _fraction(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    accepted = f"a number in {'(' if low_open else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BudgetError(name, value, accepted)
    # Comparing before converting: float(10**400) overflows.
    if not low <= value <= high or (low_open and value <= low):
        raise BudgetError(name, value, accepted)
    number = float(value)
    if not math.isfinite(number):
        raise BudgetError(name, value, accepted)
    return number


def _integer(name: str, value: Any, low: int = 1, high: int = MAX_BUDGET_TOKENS) -> int:
    accepted = f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int):
        raise BudgetError(name, value, accepted)
    if not low <= value <= high:
        raise BudgetError(name, value, accepted)
    return value


def _choice(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in POLICIES:
        raise BudgetError(name, value, f"one of {', '.join(POLICIES)}")
    return value
