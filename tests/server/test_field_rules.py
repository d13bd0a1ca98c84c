# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - a row is a line
"""Which fields go together, with which policies and on which servers: a row each."""

import dataclasses
import itertools
import re
from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve, resolve_for
from h2o_vllm.config.settings import FIELDS, OPTIONS
from h2o_vllm.errors import BudgetError, ConfigError
from h2o_vllm.plugin import engine_args
from h2o_vllm.policy.policy import Policy, policy_names, policy_pattern
from h2o_vllm.server.config_route import Defaults
from tests.served import SERVED, SHARING, policy_of
from tests.server.admitting import body, passed, refused

Fields = dict[str, Any]

UNKNOWN = {"no_scores_reason": "of the test", "equal_heads_reason": "of the test"}
"""More ranks than KV heads."""
CALIBRATED = {"kv_calibration": "unread"}
PREDICTING = [name for name in SERVED if policy_of(name).calibrated]
SETTLES = {"kv_settle_tokens": 512, "kv_policy": "key"}
UNSCORED = {"no_scores_reason": "of the test", **CALIBRATED}
HOW = [
    {"kv_policy": "h2o"}, {"kv_heads": "equal"}, {"kv_protect": 0}, {"kv_delay": 0}, {"kv_recent": 0.5},
    {"kv_elastic": False}, {"kv_evict_from": 300}, {"kv_prefill_tokens": 0}, {"kv_settle_tokens": 0},
]  # fmt: skip

REFUSED: list[tuple[Fields, Fields, str, str]] = [
    # Server, fields of a request, which one is refused, and the words.
    ({}, {"kv_budget": 0.2, "kv_budget_tokens": 64}, "kv_budget", "left out with kv_budget_tokens: "),
    ({}, {"kv_elastic": True, "kv_evict_from": 300}, "kv_evict_from", "left out with kv_elastic: "),
    ({"kv_budget": 0.5, "kv_budget_max": 0.5}, {"kv_budget": 0.6}, "kv_budget", r"a number in \[0.01, 0.5\]"),
    *(
        ({"kv_budget": 0.5, "kv_budget_max": 0.5}, fields, next(iter(fields)), r"its kv_budget_max is 0.5\)")
        for fields in ({"kv_elastic": True}, {"kv_evict_from": 300})
    ),
    ({"kv_budget": 0.5, "kv_budget_max": 0.5, "kv_elastic": True}, {"kv_evict_from": 300}, "kv_evict_from", "max"),
    *(
        (server, {"kv_prefill_tokens": 512, "kv_policy": policy}, "kv_prefill_tokens", f"0 with kv_policy {policy},")
        for policy in ("end", r"end+key")
        for server in ({}, {"kv_budget": 0.2, "kv_prefill_tokens": 512})
    ),
    *(
        ({}, {"kv_heads": "shared", "kv_policy": policy}, "kv_heads", f"equal with kv_policy {policy}, which ")
        for policy in SERVED
        if policy not in SHARING
    ),
    ({"equal_heads_reason": "of a rank"}, {"kv_heads": "shared"}, "kv_heads", r"this server \(of a rank\)"),
    *(
        (UNSCORED, {"kv_budget_tokens": 300, "kv_policy": policy}, "kv_policy", r"no attention on this server \(of")
        for policy in ("h2o", "end", "predicted+end")
    ),
    *(({}, {"kv_policy": policy}, "kv_policy", "started without --kv-calibration") for policy in PREDICTING),
    ({}, {"kv_trace": True}, "kv_trace", "false on this server .--kv-trace or --kv-playground allows it, on CPUs"),
    *(
        ({**CALIBRATED, "kv_trace": True}, {**SETTLES, **beside}, "kv_settle_tokens", f"left out with {name}: ")
        for beside in (
            {"kv_elastic": True}, {"kv_prefill_tokens": 512}, {"kv_budget_tokens": 100}, {"kv_evict_from": 300},
            {"kv_heads": "shared", "kv_policy": "predicted"}, {"kv_trace": True},
        )
        for name in list(beside)[:1]
    ),
    *(
        ({}, {**SETTLES, "kv_policy": policy}, "kv_settle_tokens", f"0 with kv_policy {policy_of(policy).name}, ")
        for policy in SERVED
        if (policy_of(policy).needs_scores or policy == "window") and not policy_of(policy).calibrated
        and policy != "auto"
    ),
    ({}, {**SETTLES, "kv_protect": "ends"}, "kv_settle_tokens", "left out with kv_protect ends: "),
    ({"no_settling_reason": "it is full"}, SETTLES, "kv_settle_tokens", r"0 on this server \(it is full\)"),
    ({"kv_budget_tokens": 300}, SETTLES, "kv_settle_tokens", "server's budget is --kv-budget-tokens"),
    *(
        ({"kv_exact_drafts": 4}, {"kv_exact": True, **how}, "kv_exact", f"false with {next(iter(how))}: ")
        for how in HOW
    ),
    ({"kv_exact_drafts": 4, "kv_trace": True}, {"kv_exact": True, "kv_trace": True}, "kv_exact", "with kv_trace: "),
    ({}, {"kv_exact": True}, "kv_exact", "started without --kv-exact"),
    ({"kv_exact_drafts": 2, "no_exact_reason": "a sundial"}, {"kv_exact": True}, "kv_exact", r"\(a sundial\)"),
]  # fmt: skip

RESOLVED: list[tuple[Fields, Fields, Fields]] = [
    # Server, fields of a request, attributes of what it gets.
    ({"kv_budget": 0.2, "kv_heads": "shared"}, {"kv_policy": "key"}, {"heads": "equal"}),
    ({"kv_budget": 0.2, "kv_heads": "shared"}, {}, {"heads": "shared"}),
    *((CALIBRATED, {"kv_policy": policy}, {"heads": "shared"}) for policy in PREDICTING),
    *((CALIBRATED, {"kv_policy": policy, "kv_heads": "equal"}, {"heads": "equal"}) for policy in PREDICTING),
    ({**CALIBRATED, "equal_heads_reason": "why"}, {"kv_policy": "predicted"}, {"heads": "equal"}),
    *(({**CALIBRATED, "shared_heads_slow": True}, {"kv_policy": policy}, {"heads": "equal"}) for policy in PREDICTING),
    ({**CALIBRATED, "shared_heads_slow": True}, {"kv_policy": "predicted", "kv_heads": "shared"}, {"heads": "shared"}),
    ({**CALIBRATED, "shared_heads_slow": True, "kv_heads": "shared"}, {"kv_policy": "predicted"}, {"heads": "shared"}),
    ({"kv_budget": 0.2, "kv_elastic": True}, {}, {"elastic": True, "evict_from": 0}),
    ({"kv_budget": 0.2, "kv_elastic": True}, {"kv_elastic": 0}, {"elastic": False}),
    ({"kv_budget": 0.2, "kv_elastic": True}, {"kv_evict_from": 300}, {"elastic": False, "evict_from": 300}),
    # Without scores a request that evicts nothing may name any policy.
    (UNSCORED, {"kv_budget": 1.0, "kv_policy": "h2o"}, {"evicts": False}),
    *((UNSCORED, {"kv_budget": 0.2, "kv_policy": policy}, {"evicts": True}) for policy in ("later", "window", "auto")),
    # What a server settles by default yields to what excludes it; what a request settles overrides defaults.
    *(
        ({**CALIBRATED, "kv_budget": 0.2, "kv_settle_tokens": 512}, beside, {"settle": 0})
        for beside in ({"kv_elastic": True}, {"kv_prefill_tokens": 512}, {"kv_budget_tokens": 100},
                       {"kv_evict_from": 300}, {"kv_heads": "shared"}, {"kv_policy": "value"},
                       {"kv_settle_tokens": 0})
    ),
    ({**CALIBRATED, "kv_elastic": True, "kv_prefill_tokens": 512, "kv_heads": "shared"},
     {"kv_settle_tokens": 256, "kv_budget": 0.2},
     {"settle": 256, "elastic": False, "prefill": 0, "heads": "equal", "delay": 0, "recent": 0.0}),
    ({"kv_budget_tokens": 300}, {**SETTLES, "kv_budget": 0.2}, {"settle": 512, "tokens": None}),
    ({"kv_exact_drafts": 4}, {"kv_exact": True}, {"exact": True, "evicts": False, "fraction": 0.1}),
    ({"kv_exact_drafts": 4}, {"kv_exact": True, "kv_budget": 1.0}, {"fraction": 1.0}),
    ({"kv_exact_drafts": 4}, {"kv_exact": True, "kv_budget_tokens": 700}, {"exact": True, "tokens": 700}),
    ({"kv_exact": True, "kv_budget": 0.2, "kv_elastic": True, "kv_protect": "prompt"}, {},
     {"exact": True, "fraction": 0.2, "elastic": False, "protect": 0}),
    ({"kv_exact": True, "kv_budget": 0.2, "kv_elastic": True}, {"kv_exact": False}, {"exact": False, "elastic": True}),
    ({**SETTLES, "kv_budget": 0.2}, {"kv_protect": "ends"}, {"settle": 0, "protect": "ends"}),
    # Naming how to evict is enough, whatever the value.
    *(({"kv_exact": True}, {"kv_budget": 0.2, **how}, {"exact": False, "evicts": True}) for how in HOW),
    ({"kv_exact": True, "kv_trace": True}, {"kv_trace": True}, {"exact": False}),
    ({"kv_exact": True, "kv_trace": True}, {"kv_trace": False}, {"exact": True}),
]  # fmt: skip


@pytest.mark.parametrize(("server", "fields", "param", "words"), REFUSED, ids=str)
def test_what_does_not_go_together_is_refused_by_name(
    server: Fields, fields: Fields, param: str, words: str
) -> None:
    refusal = refused(H2OConfig(**server), body(**fields))
    assert refusal.param == param
    assert re.search(words.replace("+", r"\+"), refusal.message), refusal.message
    assert refusal.reason == ("conflict" if "left out with" in refusal.message else "value")
    # The same as options ends the start.
    options = {row.name for row in OPTIONS}
    alone = {"kv_trace", "kv_exact"} & fields.keys() or "started without" in words
    alone = alone or "kv_budget_max" in server
    if fields.keys() <= options and not alone and "kv_budget" not in fields:
        with pytest.raises(ConfigError, match="--kv-"):
            H2OConfig(**{"kv_budget": 0.2, **server, **fields})


@pytest.mark.parametrize(("server", "fields", "wanted"), RESOLVED, ids=str)
def test_what_a_request_gets(server: Fields, fields: Fields, wanted: Fields) -> None:
    config = H2OConfig(**server)
    assert passed(config, body(**fields))
    got = resolve(config, fields)
    assert {name: getattr(got, name) for name in wanted} == wanted


VALUES: dict[str, Any] = {
    "kv_budget": 0.2, "kv_budget_tokens": 300, "kv_recent": 0.3, "kv_heads": "shared", "kv_protect": "prompt",
    "kv_delay": 4, "kv_elastic": True, "kv_prefill_tokens": 512, "kv_settle_tokens": 512, "kv_exact": True,
    "kv_evict_from": 300, "kv_trace": True,
}  # fmt: skip


@pytest.mark.parametrize("calibrated", [{}, CALIBRATED], ids=["uncalibrated", "calibrated"])
@pytest.mark.parametrize("engine", [{}, UNKNOWN], ids=["scored", "unscored"])  # fmt: skip
def test_auto_is_what_works_beside_any_option_and_field(calibrated: Fields, engine: Fields) -> None:
    assert VALUES.keys() | {"kv_policy"} == FIELDS.keys()
    options = [{}, *({name: VALUES[name]} for name in VALUES if name != "kv_evict_from")]
    fields = [{}, *({name: value} for name, value in VALUES.items())]
    for one, two, asked in itertools.product(options, options, fields):
        for named in ({}, {"kv_policy": "auto"}):
            got = outcome({"kv_budget": 0.2, **calibrated, **engine, **one, **two}, asked | named)
            if isinstance(got, Exception):
                assert not re.search("kv.policy", str(got)), (one, two, asked)
            else:
                assert not (got.needs_scores and (engine or "kv_settle_tokens" in asked))


def outcome(server: Fields, asked: Fields) -> BudgetError | ConfigError | Policy:
    """The policy by which tokens are evicted, or why there is none."""
    try:
        return resolve_for(H2OConfig(**server), asked, 600).policy
    except (BudgetError, ConfigError) as error:
        return error


def test_the_window_alone_is_enough_for_segments_to_settle() -> None:
    for more, ranks in ((CALIBRATED, "predicted+key"), ({}, "key")):
        server = H2OConfig(kv_settle_tokens=512, kv_budget=0.2, **more)
        assert resolve(server, None).policy.name == server.applied["kv_policy"] == ranks
        asked = resolve(H2OConfig(**more), {"kv_settle_tokens": 512, "kv_budget": 0.2})
        assert (asked.settle, asked.policy.name) == (512, ranks)


@pytest.mark.parametrize(
    "server",
    [
        {}, {"kv_protect": "prompt"}, {"kv_elastic": True}, {"kv_prefill_tokens": 512}, {"kv_heads": "shared"},
        {"kv_settle_tokens": 512}, {"kv_settle_tokens": 512, "kv_protect": 30, "kv_recent": 0.5}, CALIBRATED,
    ],
    ids=str,
)  # fmt: skip
def test_what_a_server_says_of_itself_is_what_a_request_gets(server: Fields) -> None:
    config = H2OConfig(kv_budget=0.2, **server)
    said, got = config.applied, resolve_for(config, None, 300)
    assert Defaults(**said).model_dump() == said
    for name, row in FIELDS.items():
        if not row.attribute or (name == "kv_protect" and said[name] in ("ends", "prompt")):
            continue
        value = getattr(got, row.attribute)
        value = value.name if name == "kv_policy" else value
        if name == "kv_recent" and got.protect == 300:
            value = said[name]
        assert value == (row.kind() if said[name] is None else said[name]), name
        assert (said[name] is None) == (row.settling_ignores and bool(got.settle))


def test_protection_depends_on_the_policy_unless_somebody_says_otherwise() -> None:
    random = {"kv_budget": 0.2, "kv_policy": "random"}
    for server, asked, tokens, protect in (
        ({}, random, 600, 600),
        ({}, random | {"kv_protect": 30}, 500, 30),
        ({"kv_protect": 0}, random, 500, 0),
        ({"kv_protect_max": 64}, random, 500, 64),
        ({}, {"kv_budget": 0.2}, 600, 1),
        ({}, {"kv_budget": 0.2}, 500, 500),
        ({}, {"kv_budget": 0.2, "kv_settle_tokens": 512}, 500, 0),
    ):
        assert resolve_for(H2OConfig(**server), asked, tokens).protect == protect


def test_a_trace_changes_nothing_of_what_it_shows() -> None:
    server = H2OConfig(kv_trace=True, **CALIBRATED)
    for asked in ({}, {"kv_heads": "shared"}, {"kv_heads": "equal"}, {"kv_policy": "window"}):
        plain, traced = (resolve(server, asked | more) for more in ({}, {"kv_trace": True}))
        assert traced == dataclasses.replace(plain, trace=True)


def test_names_of_policies_are_those_that_the_engine_can_rank_by() -> None:
    known = {"calibrated": True, "scored": False}
    assert {"auto", "later", "random", "window", "predicted", "key"} <= {*policy_names(**known)}
    assert {"text", "question", "h2o", "value", "end"}.isdisjoint(policy_names(**known))
    pattern = re.compile(policy_pattern(**known))
    assert pattern.match("predicted+key") and not pattern.match("predicted+end")
    with pytest.raises(ConfigError, match="--kv-policy predicted needs --kv-calibration FILE"):
        engine_args(kv_policy="predicted")


@pytest.mark.parametrize("drafts", [{"kv_exact": True}, {"kv_exact_drafts": 4}])
def test_exact_requests_need_a_server_that_lets_them_keep_everything(drafts: Fields) -> None:
    with pytest.raises(ConfigError, match=r"need --kv-budget-max 1, got 0\.5"):
        H2OConfig(kv_budget=0.2, kv_budget_max=0.5, **drafts)


@pytest.mark.parametrize(
    "fact",
    [each.name for each in dataclasses.fields(H2OConfig) if each.name not in {row.name for row in OPTIONS}],
)  # fmt: skip
def test_what_an_engine_can_do_is_no_option(fact: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown h2o option.s. {fact}; known: "):
        engine_args(**{fact: "because"})
    assert fact not in H2OConfig(**{fact: "because"}).to_mapping()
