# SPDX-License-Identifier: Apache-2.0
"""A budget field that stands where nothing reads it is a 400 that says where it belongs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.settings import REQUEST_FIELDS
from h2o_vllm.server.protocol import RefusalError, admit
from h2o_vllm.server.routes import Rule
from tests.server.admitting import PATH, body, passed, refused
from tests.server.vllm_like import Engine, build, post

NOWHERE = [
    "extra_body", "parameters", "options", "sampling_params", "metadata", "extra_args", "kwargs", "config",
    "chat_template_kwargs", "mm_processor_kwargs", "kv_transfer_params", "stream_options", "thinking",
]  # fmt: skip


@pytest.mark.parametrize("place", NOWHERE)
@pytest.mark.parametrize("field", REQUEST_FIELDS)
def test_a_field_inside_of_another_object_is_refused(
    config: H2OConfig, place: str, field: str
) -> None:
    refusal = refused(config, body(**{place: {"temperature": 0, field: 1}}))
    assert refusal.param == field
    assert f"{field} has no effect inside of {place}:" in refusal.message
    assert "at the top level" in refusal.message


@pytest.mark.parametrize(
    ("inside", "where"),
    [
        ({"extra_body": {"vllm_xargs": {"kv_budget": 0.2}}}, "extra_body.vllm_xargs"),
        ({"vllm_xargs": {"extra_body": {"kv_budget": 0.2}}}, "vllm_xargs.extra_body"),
        ({"options": [1, [{"a": {"kv_budget": 0.2}}]]}, "options.a"),
        ({"options": {"KV-Budget": 0.2}}, "options"),
        ({"messages": [{"role": "user", "content": "c", "kv_budget": 0.2}]}, "messages"),
        ({"messages": [[{"role": "user", "content": "c", "kv_budget": 0.2}]]}, "messages"),
        ({"system": [{"type": "text", "text": "t", "kv_budget": 0.2}]}, "system"),
        ({"tools": [{"type": "function", "function": {}, "kv_budget": 0.2}]}, "tools"),
    ],
)
def test_wherever_it_stands(config: H2OConfig, inside: dict[str, Any], where: str) -> None:
    # One at its right place beside it changes nothing.
    for request in (inside, {**inside, "kv_policy": "h2o"}):
        refusal = refused(config, body(**request))
        assert (refusal.param, refusal.reason) == ("kv_budget", "unsupported")
        assert f"inside of {where}:" in refusal.message
    assert refused(config, body(**inside), Rule.REFUSE).param == "kv_budget"


USERS = {"kv_budget": 0.2, "properties": {"kv_budget": {"type": "number", "kv_policy": "h2o"}}}


@pytest.mark.parametrize(
    "request_body",
    [
        body(
            messages=[{"role": "user", "content": [{"type": "text", "text": '{"kv_budget": 1}'}]}]
        ),
        body(messages=[{"role": "assistant", "content": [{"type": "tool_use", "input": USERS}]}]),
        body(messages=[{"role": "assistant", "tool_calls": [{"function": {"arguments": USERS}}]}]),
        body(input=[{"type": "function_call_output", "output": [USERS]}]),
        body(tools=[{"type": "function", "function": {"name": "f", "parameters": USERS}}]),
        body(tools=[{"name": "f", "input_schema": USERS}]),
        body(response_format={"type": "json_schema", "json_schema": {"schema": USERS}}),
        body(structured_outputs={"json": USERS}),
        body(text={"format": {"type": "json_schema", "schema": USERS}}),
        body(documents=[USERS]),
        body(prompt={"id": "p", "variables": USERS}),
        body(metadata={"kv_budget": None, "note": "kv_budget", "kv_transfer": 1}),
        body(user="kv_budget"),
    ],
)
def test_what_users_own_is_not_judged(config: H2OConfig, request_body: bytes) -> None:
    assert admit(request_body, PATH, Rule.LIFT, config).body == request_body
    assert admit(request_body, PATH, Rule.REFUSE, config).body == request_body


def test_a_deep_body_is_searched_or_refused(config: H2OConfig) -> None:
    for opening, closing in (('{"a":', "}"), ("[", "]")):
        for depth in (500, 900, 980, 5000):
            nested = opening * depth + '{"kv_budget":0.2}' + closing * depth
            with pytest.raises(RefusalError):
                admit(f'{{"prompt":"p","o":{nested}}}'.encode(), PATH, Rule.LIFT, config)


def test_names_in_the_message_are_cut(config: H2OConfig) -> None:
    request = {"x" * 10_000: {"y" * 10_000: {"kv_budget": 1}}}
    assert len(refused(config, body(**request)).message) < 350


@pytest.mark.asyncio
async def test_the_query_string_is_no_place_either(config: H2OConfig) -> None:
    app = build(Engine(), config)
    response = await post(app, "/v1/completions?stream=no&kv_budget=0.2")
    assert response.status_code == 400
    assert (
        "kv_budget has no effect inside of the query string" in response.json()["error"]["message"]
    )
    assert (await post(app, "/v1/completions?api-version=1")).status_code == 200


def test_fields_at_their_places_pass_beside_other_objects(config: H2OConfig) -> None:
    got = passed(config, body(kv_budget=0.2, metadata={"a": {"b": [1, {}]}}))
    assert got["vllm_xargs"] == {"kv_budget": 0.2}
    assert json.loads(body(kv_budget=0.2))["kv_budget"] == 0.2
