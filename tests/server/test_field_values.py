# SPDX-License-Identifier: Apache-2.0
"""No value a client can send reaches the engine unchecked (law 8)."""

from __future__ import annotations

import json

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server.protocol import error_body
from tests.server.admitting import body, passed, refused

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
    "kv_elastic": [
        *("2", "-1", "0.5", "1.0", "NaN", "Infinity", "1" + "0" * 400, '"true"', '"1"', '""'),
        *("[]", "[true]", "{}", '{"a": true}'),
    ],
    "kv_exact": [
        *("2", "-1", "0.5", "1.0", "NaN", "1" + "0" * 400, '"true"', '"1"', '""'),
        *("[]", "[true]", "{}"),
        # The server drafts nothing.
        *("1", "true"),
    ],
    "kv_evict_from": [
        *("0", "-1", "2147483648", "1" + "0" * 400, "300.0", "NaN", "-Infinity", "true", "false"),
        *('"300"', '""', "[]", "[300]", "{}"),
    ],
    "kv_trace": [
        *("2", "-1", "0.5", "1.0", "NaN", "1" + "0" * 400, '"true"', '"1"', '""'),
        *("[]", "[true]", "{}"),
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
    "kv_settle_tokens": [
        *("-1", "2147483648", "1" + "0" * 400, "512.0", "NaN", "-Infinity", "true", "false"),
        *('"512"', '""', "[]", "[512]", "{}"),
    ],
    "kv_heads": [
        *('""', '"Shared"', '"shared "', '"layer"', '"global"', '"' + "equal" * 3000 + '"'),
        *("0", "1", "true", "false", "NaN", "[]", '["shared"]', "{}", '{"a": 1}'),
    ],
    "kv_policy": [
        *('""', '"H2O"', '"h2o "', '"lru"', '"key+value"', '"value+value"', '"random\\u0000"'),
        '"' + "h2o" * 3000 + '"',
        *("0", "1", "1.5", "true", "false", "NaN", "[]", '["h2o"]', "{}", '{"h2o": 1}'),
    ],
}
TABLE = [(field, text) for field, texts in BAD_VALUES.items() for text in texts]


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
    said = {"message": refusal.message, "type": "BadRequestError", "param": field, "code": 400}
    assert error == said
    if text == "2" and field == "kv_budget":
        assert refusal.message == "kv_budget must be a number in [0.05, 1], got 2"


@pytest.mark.parametrize("field", list(BAD_VALUES))
def test_null_means_not_given(config: H2OConfig, field: str) -> None:
    assert passed(config, body(**{field: None}))["vllm_xargs"] is None
    assert passed(config, body(vllm_xargs={field: None, "mine": 1}))["vllm_xargs"] == {"mine": 1}
