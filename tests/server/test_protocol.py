# SPDX-License-Identifier: Apache-2.0
"""Budget fields move to where vLLM carries them, however a body is written; none is ignored."""

from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.settings import REQUEST_FIELDS
from h2o_vllm.server.protocol import Admission, RefusalError, admit
from h2o_vllm.server.routes import Rule
from tests.server.admitting import PATH, body, passed, refused


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_budget": 1},
        {"kv_budget": 0.05, "kv_recent": 0, "kv_policy": "window"},
        {"kv_budget_tokens": 2**31 - 1, "kv_recent": 1.0, "kv_policy": "random"},
        {"kv_policy": "value+key", "kv_protect": 1024, "kv_heads": "equal"},
        {"kv_elastic": 1},
        {"kv_elastic": False, "kv_evict_from": 300, "kv_prefill_tokens": 0},
    ],
)
@pytest.mark.parametrize("place", ["top", "vllm_xargs"])
def test_fields_arrive_in_vllm_xargs_with_type_and_value(
    config: H2OConfig, fields: dict[str, Any], place: str
) -> None:
    request = body(**fields) if place == "top" else body(vllm_xargs=fields)
    got = passed(config, request)
    assert got == {"model": "m", "prompt": "p", "vllm_xargs": fields}
    assert {k: type(v) for k, v in got["vllm_xargs"].items()} == {
        k: type(v) for k, v in fields.items()
    }


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


@pytest.mark.parametrize(
    ("request_body", "budget"),
    [
        # Null beside a value is no conflict; of the same key twice the last counts, as in vLLM.
        (body(kv_budget=None, vllm_xargs={"kv_budget": 0.3}), 0.3),
        (body(kv_budget=0.3, kv_budget_tokens=None, vllm_xargs=None), 0.3),
        (b'{"kv_budget": 9, "kv_budget": 0.2}', 0.2),
        (b'{"kv_budget": 0.2, "kv_budget": 9}', None),
        # Escapes and encodings write the same name.
        (rb'{"\u006bv_budget": 9}', None),
        ('{"kv_budget": 9}'.encode("utf-16"), None),
        ('{"kv_budget": 0.2}'.encode("utf-16"), 0.2),
    ],
)
def test_a_field_is_what_vllm_would_read(
    config: H2OConfig, request_body: bytes, budget: float | None
) -> None:
    if budget is None:
        assert refused(config, request_body).param == "kv_budget"
    else:
        assert passed(config, request_body)["vllm_xargs"] == {"kv_budget": budget}


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_budget": 0.2, "vllm_xargs": {"kv_budget": 0.3}},
        {"kv_budget": 0.2, "vllm_xargs": {"kv_budget": 0.2}},
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
        ("KV_BUDGET", "kv_budget"),
        ("kv-budget", "kv_budget"),
        ("kv_settle", "kv_settle_tokens"),
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


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "kv_cache_report_mode", "kv_cache_dtype", "kv_" + "x" * 100_000]
)
def test_names_are_ours_by_a_list_and_all_others_are_vllms(
    config: H2OConfig, name: str, rule: Rule
) -> None:
    value = {"do_remote_decode": True}
    for fields in ({name: value}, {"vllm_xargs": {name: value}}):
        assert admit(body(**fields), PATH, rule, config).body == body(**fields)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("value", ["x", 1, [], ["do_remote_decode"], True, "x" * 100_000])
def test_transfer_params_are_an_object_on_every_route(
    config: H2OConfig, value: Any, rule: Rule
) -> None:
    """vLLM asks a string for its members, which is a 500."""
    words = {"kv_transfer_params": value}
    in_generate = {"sampling_params": {"extra_args": words}}
    for fields in (words, {"vllm_xargs": words}, *([in_generate] if rule is Rule.REFUSE else [])):
        refusal = refused(config, body(**fields), rule)
        assert refusal.param == "kv_transfer_params"
        assert refusal.message.startswith("kv_transfer_params must be an object, got ")
        assert len(refusal.message) < 130


@pytest.mark.parametrize("xargs", [[], ["kv_budget"], "kv_budget", 1, True])
def test_xargs_that_are_no_object_are_left_for_vllm_to_refuse(
    config: H2OConfig, xargs: Any
) -> None:
    assert passed(config, body(vllm_xargs=xargs, kv_budget=0.2))["vllm_xargs"] == xargs
    assert refused(config, body(vllm_xargs=xargs, kv_budget=9)).param == "kv_budget"


def test_what_is_rendered_says_what_was_asked(config: H2OConfig) -> None:
    """Nothing is generated, so nothing is reported. Bodies without a field pass as they are."""
    admission = admit(body(kv_budget=0.5), PATH, Rule.PREPARE, config)
    assert b'"vllm_xargs":{"kv_budget":0.5}' in admission.body
    assert not admission.reported
    plain = admit(body(), PATH, Rule.PREPARE, config)
    assert (plain.body, plain.reported) == (body(), False)
    assert not admit(b"no json", PATH, Rule.PREPARE, config).reported
    assert refused(config, body(kv_budget=9), Rule.PREPARE).param == "kv_budget"


@pytest.mark.parametrize(
    "value", [True, False, None, 1, 0, 1.0, 2, [], *["true", "False", "no", "0", "on", "?", "T"]]
)
def test_beam_search_is_on_where_vllm_reads_it_so(config: H2OConfig, value: Any) -> None:
    from pydantic import ValidationError
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    try:
        beams = CompletionRequest(prompt="p", use_beam_search=value).use_beam_search
    except ValidationError:
        beams = False
    request = body(use_beam_search=value, kv_budget=0.2)
    plain = body(use_beam_search=value)
    admission = admit(plain, PATH, Rule.LIFT, config)
    assert (admission.body, admission.reported) == (plain, not beams)
    if beams:
        assert refused(config, request).reason == "unsupported"
    else:
        assert passed(config, request)["vllm_xargs"] == {"kv_budget": 0.2}


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
    assert refusal.param.startswith("kv_")
    assert f"is not supported by {PATH}" in refusal.message
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


@pytest.mark.parametrize("field", REQUEST_FIELDS)
def test_a_field_where_nothing_reads_it_is_refused(config: H2OConfig, field: str) -> None:
    for place in ("extra_body", "metadata"):
        for rule in (Rule.LIFT, Rule.REFUSE):
            refusal = refused(config, body(**{place: {"a": 1, field: 1}}), rule)
            assert (refusal.param, refusal.reason) == (field, "unsupported")
        assert (
            f"{field} has no effect inside of {place}: it belongs at the top"
            in refused(config, body(**{place: {field: 1}, "kv_delay": 4})).message
        )
        same = body(**{place: {field: None, "note": field}})
        assert admit(same, PATH, Rule.LIFT, config).body == same
    for query, refuses in ((f"a=b&{field}=".encode(), True), (b"api-version=1", False)):
        if refuses:
            with pytest.raises(RefusalError, match=f"{field} has no effect inside of the query"):
                admit(body(), PATH, Rule.LIFT, config, query)
        else:
            assert admit(body(), PATH, Rule.LIFT, config, query).body == body()


def test_what_users_own_is_not_judged(config: H2OConfig) -> None:
    users = {"kv_budget": 0.2, "properties": {"kv_budget": {"type": "number"}}}
    for place in ("tools", "documents", "response_format", "chat_template_kwargs"):
        for rule in (Rule.LIFT, Rule.REFUSE):
            request = body(**{place: [users]}, user="kv_budget")
            assert admit(request, PATH, rule, config).body == request


def test_a_trace_is_of_one_sequence() -> None:
    def ask(path: str, **fields: Any) -> None:
        admit(body(kv_trace=True, **fields), path, Rule.LIFT, H2OConfig(kv_trace=True))

    chat = "/v1/chat/completions"
    for path in ("/v1/messages", "/v1/responses", "/invocations", f"{chat}/batch"):
        with pytest.raises(RefusalError, match=f"by {path}; it is by {chat}, /v1/completions"):
            ask(path)
    ask(chat)
    for prompt in ("a", ["a"], [1, 2, 3], [[1, 2, 3]]):
        ask(PATH, prompt=prompt)
    for several in (["a", "b"], [[1], [2]]):
        with pytest.raises(RefusalError, match="several prompts"):
            ask(PATH, prompt=several)
