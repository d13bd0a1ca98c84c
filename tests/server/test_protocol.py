# SPDX-License-Identifier: Apache-2.0
"""No value a client can send reaches the engine unchecked (law 8), and none is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.policies import EQUAL_HEADS_POLICIES, REPEAT_POLICIES
from h2o_vllm.config.resolve import resolve
from h2o_vllm.errors import ConfigError
from h2o_vllm.server.protocol import Admission, RefusalError, admit, error_body
from h2o_vllm.server.routes import Rule

PATH = "/v1/completions"

# JSON text, because some of these values exist on the wire only.
BAD_VALUES: dict[str, list[str]] = {
    "kv_budget": [
        *("0", "-0.0", "0.0", "0.049", "1.01", "2", "-1", "-0.2", "1e400", "-1e400", "1e308"),
        *("NaN", "Infinity", "-Infinity", "1" + "0" * 400, "-1" + "0" * 400, "1" * 4300),
        *("true", "false", '""', '"0.2"', '"NaN"', '"half"', '"\\u0000"', '"' + "x" * 5000 + '"'),
        *("[]", "[0.2]", "{}", '{"value": 0.2}', "[" * 200 + "]" * 200, '[{"a": [null]}]'),
    ],
    "kv_budget_tokens": [
        *("0", "-1", "2147483648", "1" + "0" * 400, "1.0", "64.5", "1e3", "NaN", "Infinity"),
        *("true", "false", '"64"', '""', "[]", "[64]", "{}", '{"a": 1}'),
    ],
    "kv_recent": [
        *("-0.1", "1.1", "2", "-1", "NaN", "Infinity", "-Infinity", "1" + "0" * 400),
        *("true", "false", '"0.5"', '""', "[]", "[0.5]", "{}"),
    ],
    "kv_sinks": [
        *(
            "-1",
            "1025",
            "2147483648",
            "1" + "0" * 400,
            "-1" + "0" * 400,
            "4.0",
            "0.5",
            "NaN",
            "Infinity",
        ),
        *("true", "false", '"4"', '""', "[]", "[4]", "{}", '{"a": 1}'),
    ],
    "kv_elastic": [
        *("2", "-1", "0.5", "1.0", "NaN", "Infinity", "1" + "0" * 400, '"true"', '"1"', '""'),
        *("[]", "[true]", "{}", '{"a": true}'),
    ],
    "kv_evict_from": [
        *("0", "-1", "2147483648", "1" + "0" * 400, "300.0", "NaN", "-Infinity", "true", "false"),
        *('"300"', '""', "[]", "[300]", "{}"),
    ],
    "kv_trace": [
        *(
            "2",
            "-1",
            "0.5",
            "1.0",
            "NaN",
            "1" + "0" * 400,
            '"true"',
            '"1"',
            '""',
            "[]",
            "[true]",
            "{}",
        ),
        # The server does not let anybody ask.
        *("1", "true"),
    ],
    "kv_delay": [
        *("-1", "257", "2147483648", "1" + "0" * 400, "4.0", "0.5", "NaN", "Infinity"),
        *("true", "false", '"4"', '""', "[]", "[4]", "{}", '{"a": 1}'),
    ],
    "kv_prefill_tokens": [
        *("-1", "2147483648", "1" + "0" * 400, "512.0", "NaN", "-Infinity", "true", "false"),
        *('"512"', '""', "[]", "[512]", "{}"),
    ],
    "kv_heads": [
        *('""', '"Shared"', '"shared "', '"layer"', '"global"', '"' + "equal" * 3000 + '"'),
        *("0", "1", "true", "false", "NaN", "[]", '["shared"]', "{}", '{"a": 1}'),
    ],
    "kv_policy": [
        *('""', '"H2O"', '"h2o "', '"lru"', '"none"', '"random\\u0000"', '"' + "h2o" * 3000 + '"'),
        *("0", "1", "1.5", "true", "false", "NaN", "[]", '["h2o"]', "{}", '{"h2o": 1}'),
    ],
}
TABLE = [(field, text) for field, texts in BAD_VALUES.items() for text in texts]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", **fields}).encode()


def passed(config: H2OConfig, request: bytes, rule: Rule = Rule.LIFT) -> Any:
    admission = admit(request, PATH, rule, config)
    return json.loads(admission.body)


def refused(config: H2OConfig, request: bytes, rule: Rule = Rule.LIFT) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        admit(request, PATH, rule, config)
    return caught.value


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) > 60


@pytest.mark.parametrize("place", ["top", "vllm_xargs"])
@pytest.mark.parametrize(("field", "text"), TABLE, ids=[f"{f}={t[:20]}" for f, t in TABLE])
def test_bad_value_is_refused_by_name_with_value_and_range(
    config: H2OConfig, field: str, text: str, place: str
) -> None:
    fields = f'"{field}": {text}'
    if place == "vllm_xargs":
        fields = f'"vllm_xargs": {{{fields}}}'
    refusal = refused(config, f'{{"prompt": "p", {fields}}}'.encode())
    assert refusal.param == field
    assert refusal.message.startswith(f"{field} must be ")
    assert ", got " in refusal.message
    assert len(refusal.message) < 300
    error = json.loads(error_body(refusal))["error"]
    assert error == {
        "message": refusal.message,
        "type": "BadRequestError",
        "param": field,
        "code": 400,
    }


def test_message_names_field_value_and_range(config: H2OConfig) -> None:
    refusal = refused(config, body(kv_budget=7))
    assert refusal.message == "kv_budget must be a number in [0.05, 1], got 7"


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_budget": 0.2},
        {"kv_budget": 1},
        {"kv_budget": 0.05, "kv_recent": 0, "kv_policy": "window"},
        {"kv_budget_tokens": 1, "kv_recent": 1.0},
        {"kv_budget_tokens": 2**31 - 1, "kv_policy": "random"},
        {"kv_policy": "h2o-norm", "kv_sinks": 0},
        {"kv_policy": "keydiff", "kv_sinks": 1024},
        {"kv_policy": "full"},
        {"kv_budget": 0.2, "kv_elastic": True},
        {"kv_elastic": False, "kv_evict_from": 300},
        {"kv_elastic": 1},
        {"kv_prefill_tokens": 512},
        {"kv_policy": "snapkv", "kv_prefill_tokens": 0},
        {"kv_heads": "shared", "kv_policy": "caote"},
        {"kv_heads": "equal", "kv_policy": "window"},
    ],
)
@pytest.mark.parametrize("place", ["top", "vllm_xargs"])
def test_fields_arrive_in_vllm_xargs_with_type_and_value(
    config: H2OConfig, fields: dict[str, Any], place: str
) -> None:
    request = body(**fields) if place == "top" else body(vllm_xargs=fields)
    got = passed(config, request)
    assert got == {"model": "m", "prompt": "p", "vllm_xargs": fields}
    assert [type(v) for v in got["vllm_xargs"].values()] == [type(v) for v in fields.values()]


def test_delayed_and_elastic_exclude_each_other(config: H2OConfig) -> None:
    refusal = refused(config, body(kv_elastic=True, kv_evict_from=300))
    assert refusal.message == "kv_evict_from must be left out when kv_elastic is true, got 300"
    assert (refusal.param, refusal.reason) == ("kv_evict_from", "conflict")


@pytest.mark.parametrize("policy", ["snapkv", "snapkv-keydiff"])
def test_what_ranks_by_the_prompts_end_cannot_be_bounded_before(
    config: H2OConfig, policy: str
) -> None:
    refusal = refused(config, body(kv_prefill_tokens=512, kv_policy=policy))
    assert refusal.param == "kv_prefill_tokens"
    assert f"must be 0 with kv_policy {policy}, " in refusal.message
    server = H2OConfig(kv_budget=0.2, kv_prefill_tokens=512)
    assert refused(server, body(kv_policy=policy)).param == "kv_prefill_tokens"
    assert passed(server, body(kv_policy=policy, kv_prefill_tokens=0))
    with pytest.raises(ConfigError, match=rf"--kv-prefill-tokens: .* 0 with kv_policy {policy}, "):
        H2OConfig(kv_policy=policy, kv_prefill_tokens=512)


@pytest.mark.parametrize("policy", EQUAL_HEADS_POLICIES)
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
    engine = H2OConfig(kv_heads_equal_because="heads share on CPUs only")
    refusal = refused(engine, body(kv_heads="shared"))
    assert refusal.message == (
        "kv_heads must be equal on this server (heads share on CPUs only), got 'shared'"
    )
    assert passed(engine, body(kv_heads="equal"))


def test_a_trace_is_of_equal_heads() -> None:
    server = H2OConfig(kv_trace=True, kv_heads="shared")
    refusal = refused(server, body(kv_trace=True))
    assert refusal.param == "kv_trace" and "where kv_heads is shared" in refusal.message
    assert passed(server, body(kv_trace=True, kv_heads="equal"))
    assert passed(server, body(kv_trace=True, kv_policy="window"))


def test_heads_share_where_prompts_are_repeated_unless_somebody_says_otherwise() -> None:
    server = H2OConfig(kv_trace=True)
    for policy in REPEAT_POLICIES:
        assert resolve(server, {"kv_policy": policy}).heads == "shared"
        assert resolve(server, {"kv_policy": policy, "kv_heads": "equal"}).heads == "equal"
        assert resolve(server, {"kv_policy": policy, "kv_trace": True}).heads == "equal"
        assert resolve(H2OConfig(kv_heads="equal"), {"kv_policy": policy}).heads == "equal"
        alike = H2OConfig(kv_heads_equal_because="of the test")
        assert resolve(alike, {"kv_policy": policy}).heads == "equal"
    assert resolve(server, {}).heads == "equal"


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


def test_other_xargs_and_the_rest_of_the_body_survive_a_lift(config: H2OConfig) -> None:
    rest = {"stop": ["é\ud800", "\n"], "n": 2, "temperature": 1e-9, "seed": 2**60, "logit_bias": {}}
    got = passed(config, body(kv_budget=0.2, vllm_xargs={"mine": [1, "a"]}, **rest))
    assert got.pop("vllm_xargs") == {"mine": [1, "a"], "kv_budget": 0.2}
    assert got == {"model": "m", "prompt": "p", **rest}


@pytest.mark.parametrize(
    "request_body",
    [
        body(),
        body(vllm_xargs={"kv_budget": 0.2}),
        b'{ "prompt" : "spaces and order kept" , "temperature":1.0 }',
        b"",
        b"not json",
        b"[1, 2]",
        b'"text"',
        b"null",
        b'{"kv_budget": 0.2',
    ],
)
def test_body_without_a_field_to_move_passes_byte_for_byte(
    config: H2OConfig, request_body: bytes
) -> None:
    assert admit(request_body, PATH, Rule.LIFT, config).body == request_body


@pytest.mark.parametrize(
    "request_body",
    [
        b"\xff\xfe\x00",
        b'{"prompt": "\xff"}',
        b'{"kv_budget": ' + b"1" * 5000 + b"}",
        b'{"seed": ' + b"1" * 5000 + b"}",
        b"[" * 200_000,
    ],
    ids=["utf-16", "no-utf-8", "digits", "digits-elsewhere", "depth"],
)
def test_body_that_pythons_parser_gives_up_on_is_refused(
    config: H2OConfig, request_body: bytes
) -> None:
    assert "cannot be read" in refused(config, request_body).message
    if b"kv_" not in request_body:
        # Where we take no fields, vLLM has its own answer.
        assert admit(request_body, PATH, Rule.REFUSE, config).body == request_body


@pytest.mark.parametrize("field", list(BAD_VALUES))
def test_null_means_not_given(config: H2OConfig, field: str) -> None:
    assert passed(config, body(**{field: None}))["vllm_xargs"] is None
    assert passed(config, body(vllm_xargs={field: None, "mine": 1}))["vllm_xargs"] == {"mine": 1}


def test_null_beside_a_value_is_no_conflict(config: H2OConfig) -> None:
    got = passed(config, body(kv_budget=None, vllm_xargs={"kv_budget": 0.3}))
    assert got["vllm_xargs"] == {"kv_budget": 0.3}
    got = passed(config, body(kv_budget=0.3, kv_budget_tokens=None, vllm_xargs=None))
    assert got["vllm_xargs"] == {"kv_budget": 0.3}


def test_last_of_duplicate_keys_counts_as_in_vllm(config: H2OConfig) -> None:
    refused(config, b'{"kv_budget": 0.2, "kv_budget": 9}')
    assert passed(config, b'{"kv_budget": 9, "kv_budget": 0.2}')["vllm_xargs"] == {"kv_budget": 0.2}


def test_field_name_written_with_escapes_is_the_same_field(config: H2OConfig) -> None:
    refused(config, rb'{"\u006bv_budget": 9}')
    refused(config, '{"kv_budget": 9}'.encode("utf-16"))
    assert passed(config, '{"kv_budget": 0.2}'.encode("utf-16"))["vllm_xargs"] == {"kv_budget": 0.2}


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_budget": 0.2, "vllm_xargs": {"kv_budget": 0.3}},
        {"kv_budget": 0.2, "vllm_xargs": {"kv_budget": 0.2}},
        {"kv_budget": 0.2, "kv_budget_tokens": 64},
        {"vllm_xargs": {"kv_budget": 0.2, "kv_budget_tokens": 64}},
        {"kv_budget": 0.2, "vllm_xargs": {"kv_budget_tokens": 64}},
        {"kv_budget": 0.2, "use_beam_search": True},
    ],
)
def test_contradiction_is_refused(config: H2OConfig, fields: dict[str, Any]) -> None:
    assert refused(config, body(**fields)).param == "kv_budget"


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("kv_buget", "kv_budget"),
        ("kv_budget_token", "kv_budget_tokens"),
        ("KV_BUDGET", "kv_budget"),
        ("kv-budget", "kv_budget"),
        ("kv_rescent", "kv_recent"),
        ("kv_polcy", "kv_policy"),
    ],
)
@pytest.mark.parametrize("place", ["top", "vllm_xargs"])
def test_typo_is_refused_with_the_name_that_was_meant(
    config: H2OConfig, field: str, meant: str, place: str
) -> None:
    request = body(**{field: 0.2}) if place == "top" else body(vllm_xargs={field: 0.2})
    refusal = refused(config, request)
    assert refusal.param == field
    assert f"did you mean {meant}?" in refusal.message


def test_unknown_field_of_ours_is_refused_briefly(config: H2OConfig) -> None:
    refusal = refused(config, body(**{"kv_" + "x" * 100_000: 1}))
    assert len(refusal.message) < 250
    assert "known are kv_budget" in refusal.message


def test_vllms_own_field_passes_at_its_place_only(config: H2OConfig) -> None:
    params = {"do_remote_decode": True}
    assert passed(config, body(kv_transfer_params=params))["kv_transfer_params"] == params
    assert refused(config, body(vllm_xargs={"kv_transfer_params": "x"}))


@pytest.mark.parametrize("xargs", [[], ["kv_budget"], "kv_budget", 1, True])
def test_xargs_that_are_no_object_are_left_for_vllm_to_refuse(
    config: H2OConfig, xargs: Any
) -> None:
    assert passed(config, body(vllm_xargs=xargs, kv_budget=0.2))["vllm_xargs"] == xargs
    assert refused(config, body(vllm_xargs=xargs, kv_budget=9)).param == "kv_budget"


def test_beam_search_passes_without_a_report(config: H2OConfig) -> None:
    request = body(use_beam_search=True)
    admission = admit(request, PATH, Rule.LIFT, config)
    assert (admission.body, admission.reported) == (request, False)
    assert admit(body(), PATH, Rule.LIFT, config).reported
    assert passed(config, body(use_beam_search=False, kv_budget=0.2))


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_budget": 0.2},
        {"kv_policy": "h2o"},
        {"kv_buget": 0.2},
        {"vllm_xargs": {"kv_recent": 0.2}},
        {"sampling_params": {"kv_budget": 0.2}},
        {"sampling_params": {"extra_args": {"kv_budget": 0.2}}},
    ],
)
def test_route_that_cannot_honour_a_field_refuses_it(
    config: H2OConfig, fields: dict[str, Any]
) -> None:
    refusal = refused(config, body(**fields), Rule.REFUSE)
    assert refusal.param is not None
    assert refusal.param.startswith("kv_")
    assert f"is not supported by {PATH}" in refusal.message


def test_form_with_a_field_is_refused_too(config: H2OConfig) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{"kv_budget": 9}\r\n'
    assert refused(config, part, Rule.REFUSE).param == "kv_budget"


@pytest.mark.parametrize(
    "request_body",
    [body(), body(kv_transfer_params={"a": 1}), b"--x\r\nname=file\r\n\r\n\x00\xff", b"[]"],
)
def test_route_that_refuses_fields_passes_everything_else(
    config: H2OConfig, request_body: bytes
) -> None:
    admission = admit(request_body, PATH, Rule.REFUSE, config)
    assert admission == Admission(request_body, reported=False)


def test_operator_limits_rule_over_the_full_policy() -> None:
    capped = H2OConfig(kv_budget=0.5, kv_budget_max=0.5)
    assert refused(capped, body(kv_policy="full")).param == "kv_policy"
    assert refused(capped, body(kv_budget=0.6)).message.startswith(
        "kv_budget must be a number in [0.01, 0.5]"
    )
