# SPDX-License-Identifier: Apache-2.0
"""What an operator configures and what a request may ask for.

Runs in every process; imports :mod:`h2o_vllm.checks` and :mod:`h2o_vllm.errors`. This is the only file that
knows the names of the request fields and of the keys in vLLM's ``additional_config["h2o"]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from h2o_vllm.checks import MAX_TOKENS, check_choice, check_flag, check_fraction, check_integer
from h2o_vllm.errors import BudgetError, ConfigError

__all__ = [
    "ADMISSIONS",
    "CONFIG_KEY",
    "EQUAL_HEADS_POLICIES",
    "FULL_KERNELS",
    "HEADS",
    "MAX_DELAY",
    "MAX_SINKS",
    "MAX_TRACE_TOKENS",
    "METRICS_KEY",
    "POLICIES",
    "PROTECT_WORDS",
    "REPEAT_POLICIES",
    "REPORT_KEY",
    "REQUEST_FIELDS",
    "START_RECORD",
    "TESTING_FIELDS",
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

START_RECORD = "H2O_START_RECORD"
"""Environment variable that ``h2o-serve`` sets: the file of :mod:`h2o_vllm.engine.start_record`."""

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
    "repeat",
    "repeat-keydiff",
    "window",
    "random",
    "full",
)
"""Names accepted as ``kv_policy``, ``full`` last; see :mod:`h2o_vllm.policy`."""

BEST_RANK_POLICIES = ("caote-keydiff", "snapkv-keydiff", "caote-snapkv-keydiff", "repeat-keydiff")
"""Rank in several ways, and keep what is best in any."""

REPEAT_POLICIES = ("repeat", "repeat-keydiff")
"""Have the model repeat the prompt, and rank by what that attends to; see :mod:`h2o_vllm.policy.repeat`."""

PROMPT_END_POLICIES = ("snapkv", "snapkv-keydiff", *REPEAT_POLICIES)
"""Have nothing to rank by before the prompt's end."""

HEADS = ("equal", "shared")
"""What ``kv_heads`` may be: all KV heads of a layer keep as many tokens, or they share its heavy slots."""

EQUAL_HEADS_POLICIES = {
    "keydiff": "which measures how like the other keys of its head a key is: no measure of what a head needs",
    "window": "which drops whole blocks",
    "full": "which drops nothing",
}
"""Policies with which heads cannot share, and why."""

REQUEST_FIELDS = (
    "kv_budget",
    "kv_budget_tokens",
    "kv_recent",
    "kv_policy",
    "kv_heads",
    "kv_sinks",
    "kv_protect",
    "kv_delay",
    "kv_elastic",
    "kv_prefill_tokens",
    "kv_evict_from",
    "kv_trace",
)
"""Request fields, accepted at the top level of a body and inside ``vllm_xargs``."""

TESTING_FIELDS = ("kv_evict_from", "kv_trace")
"""Those of them that help to test, to debug and to see; a server has no default for them."""

MAX_SINKS = 1024
"""Sinks come on top of an operator's ``kv_budget_max``, so they are few."""

MAX_DELAY = 256
"""While an eviction is delayed, a request holds more than ``kv_budget_max`` says: not for long."""

MAX_TRACE_TOKENS = 4096
"""Most tokens, prompt and answer, of a request that asks for a trace: it costs two bytes per token, layer and
KV head while the request runs, and is read by people."""

PROTECT_WORDS = ("prompt", "system")
"""What ``kv_protect`` may be beside a number of first tokens: all of the prompt, or its system messages and
tool definitions. Only a server knows roles: it puts a number in the place of ``"system"``."""

ADMISSIONS = ("squeeze", "queue")
"""What ``--kv-elastic-admission`` may be: elastic requests yield to waiting prompts as well, or only where
a request would be preempted."""


FULL_KERNELS = ("auto", "vllm", "h2o")
"""What ``--kv-full-kernel`` may be: whose attention kernel serves rows that collect no scores, on a CPU."""


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
        protect: first tokens that are neither ranked nor evicted; the budget applies to those behind
            them. A number, or one of :data:`PROTECT_WORDS` as long as the prompt is not known.
        delay: generated tokens before which nothing is evicted.
        elastic: everything is kept until memory is short; what this budget says is the floor.
        evict_from: no eviction before this many tokens have been seen; 0: behind the prompt, as is
            whatever lies inside of it.
        prefill: unprotected tokens that a prompt may hold while it is computed; 0: all it has. See
            :class:`h2o_vllm.blocks.schedule.EvictionSchedule`, which rounds it.
        trace: whether the report says which positions each layer and KV head still holds.
        heads: one of :data:`HEADS`.
    """

    fraction: float
    tokens: int | None
    min_fraction: float
    max_fraction: float
    floor: int
    recent: float
    policy: str
    sinks: int = 0
    protect: int | str = 0
    delay: int = 0
    elastic: bool = False
    evict_from: int = 0
    prefill: int = 0
    trace: bool = False
    heads: str = "equal"

    @property
    def evicts(self) -> bool:
        """Whether this request can ever give up a token. If not, it is served by stock vLLM."""
        bounded = self.tokens is not None or self.fraction < 1.0 or self.prefill > 0
        return self.policy != "full" and bounded


@dataclass(frozen=True)
class H2OConfig:
    """Server-wide defaults and operator limits.

    Attributes:
        kv_budget: default share of the seen tokens a request keeps, in (0, 1]; 1 is lossless.
        kv_budget_tokens: default absolute budget; overrides ``kv_budget`` when set.
        kv_recent: default share of a budget spent on the newest tokens, in [0, 1]; ``None``: see
            :meth:`recent_of`.
        kv_policy: default policy, one of :data:`POLICIES`. ``h2o`` is the paper's.
        kv_sinks: default number of first tokens that are never evicted, 0 to 1024.
        kv_budget_min: smallest ``kv_budget`` a request may ask for.
        kv_budget_max: largest ``kv_budget`` a request may ask for.
        kv_min_tokens: no budget falls below this many tokens; short sequences stay whole.
        kv_protect: default number of first tokens that a budget leaves alone, or one of
            :data:`PROTECT_WORDS`. A default protects at most ``kv_protect_max`` tokens of a longer
            prompt; a request that asks for more is refused.
        kv_protect_max: most tokens a request may protect; ``None``: see :attr:`protect_limit`. They come
            on top of ``kv_budget_max``.
        kv_delay: default number of generated tokens before a request's first eviction, 0 to 256: until then
            an answer is lossless, and its queries have their say in what stays. The paper evicts at once (0).
        kv_elastic: whether requests keep everything until memory is short, their budgets being floors.
        kv_elastic_admission: one of :data:`ADMISSIONS`.
        kv_prefill_tokens: default number of unprotected tokens that a prompt may hold while it is computed;
            0: all it has. Raised to four blocks and twice ``kv_min_tokens``.
        kv_trace: whether requests may ask for a trace, see :mod:`h2o_vllm.blocks.trace`.
        kv_repeat: whether requests may ask for one of :data:`REPEAT_POLICIES`, which compute each prompt
            about twice. For CPUs.
        kv_full_kernel: one of :data:`FULL_KERNELS`. ``h2o`` is for CPUs, and nothing is lost with it: the
            same attention, rounded differently. ``auto`` is ``h2o`` where vLLM would use its kernel for AMX,
            whose KV only that one reads, and ``vllm`` elsewhere.
        kv_heads: one of :data:`HEADS`; ``None``: see :meth:`heads_of`. A request that does not name it, and
            one of :data:`EQUAL_HEADS_POLICIES`, has ``equal``.
        kv_heads_equal_because: why heads cannot share in this engine; empty: they can. No option: who knows
            the engine says it, see :func:`h2o_vllm.engine.support.config_of`.

    Raises:
        ConfigError: a value is out of range, or the defaults violate the limits.
    """

    kv_budget: float = 1.0
    kv_budget_tokens: int | None = None
    kv_recent: float | None = None
    kv_policy: str = "caote-snapkv-keydiff"
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
    kv_repeat: bool = True
    kv_full_kernel: str = "auto"
    kv_heads: str | None = None
    kv_heads_equal_because: str = ""

    def __post_init__(self) -> None:
        try:
            for name in ("kv_budget", "kv_budget_min", "kv_budget_max"):
                check_fraction(name, getattr(self, name), 0.0, 1.0, low_open=True)
            if self.kv_recent is not None:
                check_fraction("kv_recent", self.kv_recent, 0.0, 1.0)
            check_choice("kv_policy", self.kv_policy, POLICIES)
            check_integer("kv_sinks", self.kv_sinks, 0, MAX_SINKS)
            if self.kv_budget_tokens is not None:
                check_integer("kv_budget_tokens", self.kv_budget_tokens)
            check_integer("kv_min_tokens", self.kv_min_tokens)
            if self.kv_protect_max is not None:
                check_integer("kv_protect_max", self.kv_protect_max, 0)
            _protect(self.kv_protect, MAX_TOKENS)
            check_integer("kv_delay", self.kv_delay, 0, MAX_DELAY)
            check_flag("kv_elastic", self.kv_elastic)
            check_choice("kv_elastic_admission", self.kv_elastic_admission, ADMISSIONS)
            _prefill(self.kv_prefill_tokens, self.kv_policy)
            check_flag("kv_trace", self.kv_trace)
            check_flag("kv_repeat", self.kv_repeat)
            check_choice("kv_full_kernel", self.kv_full_kernel, FULL_KERNELS)
            named = {} if self.kv_heads is None else {"kv_heads": self.kv_heads}
            self._heads(named, self.kv_policy)
        except BudgetError as error:
            raise ConfigError(f"--{error.parameter.replace('_', '-')}: {error}") from None
        if self.kv_policy in REPEAT_POLICIES and not self.kv_repeat:
            raise ConfigError(
                f"--kv-policy {self.kv_policy} repeats prompts, and --no-kv-repeat lets nobody do so"
            )
        if isinstance(self.kv_protect, int) and self.kv_protect > self._most_protected:
            raise ConfigError(
                f"--kv-protect {self.kv_protect} is larger than --kv-protect-max {self.kv_protect_max}"
            )
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

        ``protect`` may still be a word, see :meth:`resolve_for`.

        Args:
            asked: a mapping that may hold any of :data:`REQUEST_FIELDS`; other keys are ignored.

        Raises:
            BudgetError: a field has the wrong type, is out of range, or contradicts another.
        """
        given = {k: asked[k] for k in REQUEST_FIELDS if asked and asked.get(k) is not None}
        policy = check_choice("kv_policy", given.get("kv_policy", self.kv_policy), self.policies)
        recent = given.get("kv_recent", self.recent_of(policy))
        recent = check_fraction("kv_recent", recent, 0.0, 1.0)
        sinks = check_integer("kv_sinks", given.get("kv_sinks", self.kv_sinks), 0, MAX_SINKS)
        if "kv_budget" in given and "kv_budget_tokens" in given:
            raise BudgetError(
                "kv_budget", given["kv_budget"], "left out when kv_budget_tokens is given"
            )
        protect = _protect(given.get("kv_protect", self.kv_protect), self._most_protected)
        delay = check_integer("kv_delay", given.get("kv_delay", self.kv_delay), 0, MAX_DELAY)
        fraction, tokens = self.kv_budget, self.kv_budget_tokens
        if "kv_budget" in given:
            low, high = self.kv_budget_min, self.kv_budget_max
            fraction, tokens = check_fraction("kv_budget", given["kv_budget"], low, high), None
        elif "kv_budget_tokens" in given:
            tokens = check_integer("kv_budget_tokens", given["kv_budget_tokens"])
        if policy == "full":
            if self.kv_budget_max < 1.0:
                raise BudgetError(
                    "kv_policy",
                    policy,
                    f"one of {', '.join(self.policies[:-1])} on this server "
                    f"(its kv_budget_max is {self.kv_budget_max})",
                )
            fraction, tokens = 1.0, None
        prefill = _prefill(given.get("kv_prefill_tokens", self.kv_prefill_tokens), policy)
        elastic, evict_from = self._begin(given)
        heads = self._heads(given, policy)
        return RequestBudget(
            fraction=fraction,
            tokens=tokens,
            min_fraction=self.kv_budget_min,
            max_fraction=self.kv_budget_max,
            floor=self.kv_min_tokens,
            recent=recent,
            policy=policy,
            sinks=sinks,
            protect=protect,
            delay=delay,
            elastic=elastic,
            evict_from=evict_from,
            prefill=prefill,
            trace=self._trace(given, heads),
            heads=heads,
        )

    @property
    def policies(self) -> tuple[str, ...]:
        """The :data:`POLICIES` that requests may ask for, ``full`` last."""
        return tuple(name for name in POLICIES if self.kv_repeat or name not in REPEAT_POLICIES)

    def recent_of(self, policy: str) -> float:
        """Share of the newest tokens if a request does not say: half, the paper's, unless this server does.

        A policy that ranks in several ways has too few tokens for each left by then: it gets a quarter. One
        that has seen the prompt repeated knows what of it will be needed, the newest included: a tenth.
        """
        if self.kv_recent is not None:
            return self.kv_recent
        if policy in REPEAT_POLICIES:
            return 0.1
        return 0.25 if policy in BEST_RANK_POLICIES else 0.5

    def heads_of(self, policy: str) -> str:
        """Who shares slots if a request does not say: nobody, unless this server does.

        What repeating a prompt looks at lies in few heads: with equal ones half of it would go.
        """
        if self.kv_heads_equal_because or policy in EQUAL_HEADS_POLICIES:
            return "equal"
        if self.kv_heads is not None:
            return self.kv_heads
        return "shared" if policy in REPEAT_POLICIES else "equal"

    def _heads(self, given: Mapping[str, Any], policy: str) -> str:
        if "kv_heads" not in given:
            # A trace wants heads that lose as many tokens, and nobody has asked for others.
            alike = self.kv_heads is None and bool(given.get("kv_trace"))
            return "equal" if alike else self.heads_of(policy)
        heads = check_choice("kv_heads", given["kv_heads"], HEADS)
        if heads == "shared" and self.kv_heads_equal_because:
            accepted = f"equal on this server ({self.kv_heads_equal_because})"
            raise BudgetError("kv_heads", heads, accepted)
        if heads == "shared" and policy in EQUAL_HEADS_POLICIES:
            accepted = f"equal with kv_policy {policy}, {EQUAL_HEADS_POLICIES[policy]}"
            raise BudgetError("kv_heads", heads, accepted)
        return heads

    def _trace(self, given: Mapping[str, Any], heads: str) -> bool:
        trace = check_flag("kv_trace", given.get("kv_trace", False))
        if trace and not self.kv_trace:
            accepted = (
                "false on this server (it was started without --kv-trace and --kv-playground)"
            )
            raise BudgetError("kv_trace", True, accepted)
        if trace and heads == "shared":
            accepted = (
                "false where kv_heads is shared (heads that lose different numbers of tokens)"
            )
            raise BudgetError("kv_trace", True, accepted)
        return trace

    def _begin(self, given: Mapping[str, Any]) -> tuple[bool, int]:
        """When evictions begin: ``elastic`` and ``evict_from`` of a :class:`RequestBudget`.

        Who bounds budgets does not expect requests to keep everything for a while, but by choice.
        """
        elastic = check_flag("kv_elastic", given.get("kv_elastic", self.kv_elastic))
        bounded = self.kv_budget_max < 1.0
        server = f"on this server (its kv_budget_max is {self.kv_budget_max})"
        if elastic and bounded and not self.kv_elastic:
            raise BudgetError("kv_elastic", True, f"false {server}")
        if "kv_evict_from" not in given:
            return elastic, 0
        asked = given["kv_evict_from"]
        evict_from = check_integer("kv_evict_from", asked)
        if elastic and "kv_elastic" in given:
            raise BudgetError("kv_evict_from", asked, "left out when kv_elastic is true")
        if bounded:
            raise BudgetError("kv_evict_from", asked, f"left out {server}")
        return False, evict_from

    def resolve_for(self, asked: Mapping[str, Any] | None, prompt_tokens: int) -> RequestBudget:
        """As :meth:`resolve`, where the prompt is known and its roles are not: ``protect`` is a number.

        Never more than the prompt has. The default ``"system"`` protects nothing here: a server names a
        number for every prompt that has such a part.

        Raises:
            BudgetError: as above; ``"system"`` is asked for; or ``"prompt"``, and it is too long.
        """
        budget = self.resolve(asked)
        named = asked is not None and asked.get("kv_protect") is not None
        protect, limit = budget.protect, self._most_protected
        if protect == "prompt":
            if named and prompt_tokens > limit:
                accepted = f"at most {limit} tokens here (the prompt has {prompt_tokens})"
                raise BudgetError("kv_protect", protect, accepted)
            protect = limit
        elif protect == "system":
            if named:
                accepted = "a number or 'prompt' here: only a chat on a server has a system part"
                raise BudgetError("kv_protect", protect, accepted)
            protect = 0
        return replace(budget, protect=min(int(protect), prompt_tokens))

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

    @property
    def _most_protected(self) -> int:
        limit = self.protect_limit
        return MAX_TOKENS if limit is None else limit


def _prefill(value: Any, policy: str) -> int:
    tokens = check_integer("kv_prefill_tokens", value, 0)
    if tokens and policy in PROMPT_END_POLICIES:
        accepted = (
            f"0 with kv_policy {policy}, which has nothing to rank by before the prompt's end"
        )
        raise BudgetError("kv_prefill_tokens", tokens, accepted)
    return tokens


def _protect(value: Any, limit: int) -> int | str:
    if isinstance(value, str) and value in PROTECT_WORDS:
        return value
    try:
        return check_integer("kv_protect", value, 0, limit)
    except BudgetError as error:
        words = " or ".join(f"'{word}'" for word in PROTECT_WORDS)
        raise BudgetError("kv_protect", value, f"{error.accepted}, {words}") from None
