# SPDX-License-Identifier: Apache-2.0
"""Which fields go together, with which policies and on which servers; refusals say so."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve, resolve_for
from h2o_vllm.errors import BudgetError, ConfigError
from h2o_vllm.plugin import engine_args
from h2o_vllm.policy import policy as policies
from h2o_vllm.policy.policy import joinable_ranks, policy_names, policy_pattern
from h2o_vllm.policy.presets import REMOVED
from h2o_vllm.policy.ranks import RANKS
from tests.served import SERVED, SHARING, policy_of
from tests.server.admitting import body, passed, refused

PREDICTING = [name for name in SERVED if policy_of(name).calibrated]


def test_delayed_and_elastic_exclude_each_other(config: H2OConfig) -> None:
    refusal = refused(config, body(kv_elastic=True, kv_evict_from=300))
    assert refusal.message == "kv_evict_from must be left out when kv_elastic is true, got 300"
    assert (refusal.param, refusal.reason) == ("kv_evict_from", "conflict")


@pytest.mark.parametrize("policy", ["end", "end+key"])
def test_what_ranks_by_the_prompts_end_cannot_be_bounded_before(
    config: H2OConfig, policy: str
) -> None:
    refusal = refused(config, body(kv_prefill_tokens=512, kv_policy=policy))
    assert refusal.param == "kv_prefill_tokens"
    assert f"must be 0 with kv_policy {policy}, " in refusal.message
    server = H2OConfig(kv_budget=0.2, kv_prefill_tokens=512)
    assert refused(server, body(kv_policy=policy)).param == "kv_prefill_tokens"
    assert passed(server, body(kv_policy=policy, kv_prefill_tokens=0))
    with pytest.raises(
        ConfigError, match=rf"--kv-prefill-tokens: .* 0 with kv_policy {re.escape(policy)}, "
    ):
        H2OConfig(kv_policy=policy, kv_prefill_tokens=512)


@pytest.mark.parametrize("policy", [name for name in SERVED if name not in SHARING])
def test_heads_share_only_what_can_be_compared(config: H2OConfig, policy: str) -> None:
    refusal = refused(config, body(kv_heads="shared", kv_policy=policy))
    assert (refusal.param, refusal.reason) == ("kv_heads", "value")
    assert f"must be equal with kv_policy {policy}, which " in refusal.message
    # A default is for those that it can be for.
    server = H2OConfig(kv_budget=0.2, kv_heads="shared")
    assert passed(server, body(kv_policy=policy))
    assert resolve(server, {"kv_policy": policy}).heads == "equal"
    assert resolve(server, None).heads == "shared"
    assert refused(server, body(kv_policy=policy, kv_heads="shared")).param == "kv_heads"
    with pytest.raises(ConfigError, match=rf"--kv-heads: .* equal with kv_policy {policy}, "):
        H2OConfig(kv_policy=policy, kv_heads="shared")


def test_heads_cannot_share_in_every_engine() -> None:
    engine = H2OConfig(kv_heads_equal_because="a rank has only some")
    refusal = refused(engine, body(kv_heads="shared"))
    assert refusal.message == (
        "kv_heads must be equal on this server (a rank has only some), got 'shared'"
    )
    assert passed(engine, body(kv_heads="equal"))


def test_attention_is_not_known_in_every_engine() -> None:
    engine = H2OConfig(kv_scores_not_because="of the test", kv_calibration="unread")
    refusal = refused(engine, body(kv_budget=0.2))
    assert refusal.param == "kv_policy"
    assert refusal.message.startswith(
        "kv_policy must be one that collects no attention on this server (of the test); 'later', "
    )
    for policy in ("auto", "h2o", "end", "predicted+end"):
        assert refused(engine, body(kv_budget_tokens=300, kv_policy=policy)).param == "kv_policy"
        # It evicts nothing.
        assert passed(engine, body(kv_budget=1.0, kv_policy=policy))
    for policy in ("later", "predicted", "key", "random", "window"):
        assert passed(engine, body(kv_budget=0.2, kv_policy=policy))
    with pytest.raises(ConfigError, match=r"--kv-policy: .* collects no attention on this server"):
        H2OConfig(kv_scores_not_because="of the test", kv_budget=0.2)
    told = {"calibrated": True, "scored": False}
    assert {"later", "random", "window", "predicted", "key"} <= {*policy_names(**told)}
    assert {"auto", "text", "question", "h2o", "value", "end"}.isdisjoint(policy_names(**told))
    pattern = re.compile(policy_pattern(**told))
    assert pattern.match("predicted+key") and not pattern.match("predicted+end")


def test_gpus_refuse_ranks_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = (dataclasses.replace(rank, op=None) if rank.name == "key" else rank for rank in RANKS)
    monkeypatch.setattr(policies, "RANKS", tuple(ranks))
    engine = H2OConfig(kv_ops_because="of the test", kv_policy="value")
    for policy in ("key", "value+key", "later", "auto"):
        refusal = refused(engine, body(kv_budget=0.2, kv_policy=policy))
        assert refusal.message.startswith("kv_policy must be one without key on this server (of th")
        assert passed(engine, body(kv_budget=1.0, kv_policy=policy)), "it evicts nothing"
    for policy in ("value", "end", "text", "random", "window"):
        assert passed(engine, body(kv_budget=0.2, kv_policy=policy))
    assert passed(H2OConfig(), body(kv_budget=0.2, kv_policy="value+key")), "CPUs serve it"
    assert "key" not in joinable_ranks(**engine.accepts)
    assert {"auto", "question", "later", "key"}.isdisjoint(policy_names(**engine.accepts))
    with pytest.raises(ConfigError, match=r"--kv-policy: .* one without key on this server"):
        H2OConfig(kv_ops_because="of the test", kv_budget=0.2)


def test_a_trace_changes_nothing_of_what_it_shows() -> None:
    server = H2OConfig(kv_trace=True, kv_calibration="unread")
    for asked in ({}, {"kv_heads": "shared"}, {"kv_heads": "equal"}, {"kv_policy": "window"}):
        plain, traced = (resolve(server, asked | more) for more in ({}, {"kv_trace": True}))
        assert traced == dataclasses.replace(plain, trace=True)


@pytest.mark.parametrize("policy", PREDICTING)
def test_predicting_wants_a_calibration(config: H2OConfig, policy: str) -> None:
    refusal = refused(config, body(kv_policy=policy))
    assert (refusal.param, refusal.reason) == ("kv_policy", "value")
    assert "started without --kv-calibration" in refusal.message
    server = H2OConfig(kv_calibration="unread")
    assert passed(server, body(kv_policy=policy))
    with pytest.raises(
        ConfigError, match=rf"--kv-policy {re.escape(policy)} needs --kv-calibration FILE"
    ):
        engine_args(kv_policy=policy)
    with pytest.raises(ConfigError, match=r"--kv-calibration: .*the path of a file"):
        H2OConfig(kv_calibration=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", REMOVED)
def test_a_removed_policy_is_refused_and_the_refusal_names_what_replaces_it(policy: str) -> None:
    for server in (H2OConfig(), H2OConfig(kv_calibration="unread")):
        refusal = refused(server, body(kv_policy=policy))
        assert (refusal.param, refusal.reason) == ("kv_policy", "value")
        assert REMOVED[policy] in refusal.message
    with pytest.raises(ConfigError, match=f"--kv-policy: .*{re.escape(REMOVED[policy])}"):
        H2OConfig(kv_policy=policy)


def test_random_protects_the_prompt_unless_somebody_says_otherwise() -> None:
    asked = {"kv_budget": 0.2, "kv_policy": "random"}
    assert resolve_for(H2OConfig(), asked, 600).protect == 600
    assert resolve_for(H2OConfig(), asked | {"kv_protect": 30}, 500).protect == 30
    assert resolve_for(H2OConfig(kv_protect=0), asked, 500).protect == 0
    assert resolve_for(H2OConfig(kv_protect_max=64), asked, 500).protect == 64
    assert resolve_for(H2OConfig(), {"kv_budget": 0.2}, 600).protect == 0


def test_heads_share_with_predicted_scores_unless_a_request_says_otherwise() -> None:
    server = H2OConfig(kv_calibration="unread")
    for policy in PREDICTING:
        assert resolve(server, {"kv_policy": policy}).heads == "shared"
        assert resolve(server, {"kv_policy": policy, "kv_heads": "equal"}).heads == "equal"
        equal = H2OConfig(kv_heads="equal", kv_calibration="unread")
        assert resolve(equal, {"kv_policy": policy}).heads == "equal"
        alike = H2OConfig(kv_heads_equal_because="of the test", kv_calibration="unread")
        assert resolve(alike, {"kv_policy": policy}).heads == "equal"
    assert resolve(H2OConfig(), {}).heads == "equal"


def test_a_trace_is_only_for_servers_that_allow_it_and_the_refusal_says_how(
    config: H2OConfig,
) -> None:
    message = refused(config, body(kv_trace=True)).message
    assert message == (
        "kv_trace must be false on this server (it was started without --kv-trace and --kv-playground), "
        "got True"
    )
    assert passed(config, body(kv_trace=False))["vllm_xargs"] == {"kv_trace": False}
    assert passed(H2OConfig(kv_trace=True), body(kv_trace=True))["vllm_xargs"] == {"kv_trace": True}


@pytest.mark.parametrize("fields", [{"kv_elastic": True}, {"kv_evict_from": 300}])
def test_who_bounds_budgets_bounds_what_is_whole_for_a_while(fields: dict[str, Any]) -> None:
    bounded = H2OConfig(kv_budget=0.5, kv_budget_max=0.5)
    refusal = refused(bounded, body(**fields))
    assert (
        refusal.param in fields and "on this server (its kv_budget_max is 0.5)" in refusal.message
    )
    assert passed(bounded, body(kv_elastic=False))["vllm_xargs"] == {"kv_elastic": False}
    # An operator who wants it elastic has chosen; holding on without ever yielding stays out.
    elastic = H2OConfig(kv_budget=0.5, kv_budget_max=0.5, kv_elastic=True)
    if "kv_elastic" in fields:
        assert passed(elastic, body(**fields))["vllm_xargs"] == fields
    else:
        assert refused(elastic, body(**fields)).param == "kv_evict_from"


def test_what_an_elastic_server_makes_of_requests() -> None:
    config = H2OConfig(kv_budget=0.2, kv_elastic=True)

    def begin(**asked: Any) -> tuple[bool, int]:
        budget = resolve(config, asked)
        return budget.elastic, budget.evict_from

    assert begin() == begin(kv_elastic=1) == (True, 0)
    assert begin(kv_elastic=False) == begin(kv_elastic=0) == (False, 0)
    # Naming the point is enough: nobody has to say that such a request does not yield.
    assert begin(kv_evict_from=300) == begin(kv_evict_from=300, kv_elastic=False) == (False, 300)


def test_operator_limits_rule() -> None:
    capped = H2OConfig(kv_budget=0.5, kv_budget_max=0.5)
    assert refused(capped, body(kv_budget=0.6)).message.startswith(
        "kv_budget must be a number in [0.01, 0.5]"
    )


@pytest.mark.parametrize("nested", [False, True])
def test_a_removed_field_is_refused_and_the_refusal_names_what_replaces_it(
    config: H2OConfig, nested: bool
) -> None:
    fields = {"vllm_xargs": {"kv_sinks": 4}} if nested else {"kv_sinks": 4}
    refusal = refused(config, body(**fields))
    assert (refusal.param, refusal.reason) == ("kv_sinks", "unknown_field")
    assert "it was removed; kv_protect keeps a number of first tokens" in refusal.message
    with pytest.raises(BudgetError, match=r"kv_sinks must be left out: .*kv_protect"):
        resolve(config, {"kv_sinks": 4})
    with pytest.raises(ConfigError, match="kv_sinks: it was removed; kv_protect"):
        engine_args(kv_sinks=4)


SETTLES = {"kv_settle_tokens": 512, "kv_policy": "key"}


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ({"kv_elastic": True}, "with kv_elastic: "),
        ({"kv_prefill_tokens": 512}, "with kv_prefill_tokens: "),
        ({"kv_budget_tokens": 100}, "with kv_budget_tokens: "),
        ({"kv_evict_from": 300}, "with kv_evict_from: "),
        ({"kv_heads": "shared", "kv_policy": "predicted"}, "with kv_heads 'shared': "),
        *(
            ({"kv_policy": policy}, f"with kv_policy {policy_of(policy).name}, which ")
            for policy in SERVED
            if policy_of(policy).needs_scores or policy == "window"
        ),
    ],
    ids=str,
)
def test_what_cannot_settle_says_why(beside: dict[str, Any], why: str) -> None:
    config = H2OConfig(kv_calibration="unread")
    refusal = refused(config, body(**SETTLES | beside))
    assert refusal.param == "kv_settle_tokens"
    assert f"must be 0 {why}" in refusal.message
    # A server's default applies only to requests that can settle.
    server = H2OConfig(kv_calibration="unread", kv_budget=0.2, kv_settle_tokens=512)
    assert resolve(server, beside).settle == 0
    assert resolve(server, None).settle == 512
    if "kv_evict_from" not in beside:
        with pytest.raises(ConfigError, match=f"--kv-settle-tokens: .* 0 {re.escape(why)}"):
            H2OConfig(kv_calibration="unread", **SETTLES | beside)


def test_a_trace_does_not_follow_what_settles() -> None:
    config = H2OConfig(kv_trace=True)
    assert "0 with kv_trace: " in refused(config, body(**SETTLES, kv_trace=True)).message


def test_nothing_settles_in_an_engine_that_cannot() -> None:
    engine = H2OConfig(kv_settles_not_because="no table of its can be written")
    refusal = refused(engine, body(**SETTLES))
    assert refusal.message == (
        "kv_settle_tokens must be 0 on this server (no table of its can be written), got 512"
    )
    assert passed(engine, body(kv_policy="key", kv_settle_tokens=0))


def test_what_settling_excludes_yields_to_it_if_it_is_the_servers() -> None:
    server = H2OConfig(
        kv_calibration="unread", kv_elastic=True, kv_prefill_tokens=512, kv_heads="shared"
    )
    asked = {"kv_settle_tokens": 256, "kv_budget": 0.2}
    one = resolve(server, asked)
    assert (one.settle, one.elastic, one.prefill, one.heads) == (256, False, 0, "equal")
    # `auto` must collect no attention, so it ranks by the attention that the calibration predicts.
    assert one.policy.name == "predicted+key"
    with pytest.raises(BudgetError, match="0 with kv_policy value"):
        resolve(H2OConfig(), asked)
    tokens = H2OConfig(kv_budget_tokens=300)
    assert resolve(tokens, SETTLES | {"kv_budget": 0.2}).settle == 512
    with pytest.raises(BudgetError, match="0 where the server's budget is --kv-budget-tokens"):
        resolve(tokens, SETTLES)


EXACT = H2OConfig(kv_exact_drafts=4)


def test_an_exact_request_evicts_nothing_and_drafts_on_its_budget() -> None:
    one = resolve(EXACT, {"kv_exact": True})
    assert (one.exact, one.evicts, one.fraction) == (True, False, 0.1)
    assert resolve(EXACT, {"kv_exact": True, "kv_budget": 1.0}).fraction == 1.0
    assert resolve(EXACT, {"kv_exact": True, "kv_budget_tokens": 700}).tokens == 700
    server = H2OConfig(kv_exact=True, kv_budget=0.2, kv_elastic=True, kv_protect="prompt")
    assert server.exact_drafts == 4
    one = resolve(server, None)
    assert (one.exact, one.fraction, one.elastic, one.protect) == (True, 0.2, False, 0)
    one = resolve(server, {"kv_exact": False})
    assert (one.exact, one.evicts, one.elastic) == (False, True, True)


@pytest.mark.parametrize(
    "beside",
    [
        {"kv_policy": "h2o"},
        {"kv_heads": "equal"},
        {"kv_protect": 8},
        {"kv_delay": 4},
        {"kv_recent": 0.5},
        {"kv_elastic": True},
        {"kv_evict_from": 300},
        {"kv_prefill_tokens": 512},
        {"kv_settle_tokens": 512, "kv_policy": "key"},
        {"kv_trace": True},
    ],
    ids=str,
)
def test_how_to_evict_contradicts_exact_and_overrides_its_default(beside: dict[str, Any]) -> None:
    server = H2OConfig(kv_exact_drafts=4, kv_trace=True)
    refusal = refused(server, body(kv_exact=True, **beside))
    assert refusal.param == "kv_exact"
    assert "must be false with kv_" in refusal.message
    assert not resolve(H2OConfig(kv_exact=True, kv_trace=True), beside).exact


def test_where_nothing_drafts_no_request_is_exact() -> None:
    assert "started without --kv-exact" in refused(H2OConfig(), body(kv_exact=True)).message
    engine = H2OConfig(kv_exact_drafts=2, kv_exact_not_because="it is a sundial")
    assert "(it is a sundial)" in refused(engine, body(kv_exact=True)).message
    assert passed(engine, body(kv_exact=False))
    for bounded in ({"kv_exact": True}, {"kv_exact_drafts": 4}):
        with pytest.raises(ConfigError, match=r"need --kv-budget-max 1, got 0\.5"):
            H2OConfig(kv_budget=0.2, kv_budget_max=0.5, **bounded)
