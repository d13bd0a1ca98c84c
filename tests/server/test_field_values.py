# SPDX-License-Identifier: Apache-2.0
"""No value a client can send reaches the engine unchecked (law 8)."""

import json

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server.protocol import error_body
from tests.server.admitting import body, passed, refused

# JSON text, because some of these values exist on the wire only.
EVERYWHERE = (
    *("-1", "1e308", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "2147483648"),
    *("1" + "0" * 400, "-1" + "0" * 400, "1" * 4300),
    *('""', '"0.2"', '"NaN"', '"1"', '"true"', '"h2o "', '"\\u0000"', '"' + "x" * 5000 + '"'),
    *("[]", "[0.2]", "{}", '{"value": 0.2}', "[" * 200 + "]" * 200, '[{"a": [null]}]'),
)
"""What no field takes."""
NUMBERS_ALONE, FLAGS_ALONE = ("true", "false"), ("2", "0.5", "1.0")
BAD_VALUES: dict[str, tuple[str, ...]] = {
    "kv_budget": ("0", "-0.0", "0.0", "0.049", "1.01", "2", "-0.2", *NUMBERS_ALONE),
    "kv_budget_tokens": ("0", "1.0", "64.5", "1e3", *NUMBERS_ALONE),
    "kv_recent": ("-0.1", "1.1", "2", *NUMBERS_ALONE),
    "kv_elastic": FLAGS_ALONE,
    # The server drafts nothing, and does not let anybody ask for a trace.
    "kv_exact": (*FLAGS_ALONE, "1", "true"),
    "kv_trace": (*FLAGS_ALONE, "1", "true"),
    "kv_evict_from": ("0", "300.0", *NUMBERS_ALONE),
    "kv_delay": ("257", "4.0", "0.5", *NUMBERS_ALONE),
    "kv_prefill_tokens": ("512.0", *NUMBERS_ALONE),
    "kv_settle_tokens": ("512.0", *NUMBERS_ALONE),
    "kv_heads": ('"Shared"', '"layer"', '"global"', '["shared"]', "0", "1", *NUMBERS_ALONE),
    "kv_policy": (
        *('"H2O"', '"lru"', '"key+value"', '"value+value"', '"random\\u0000"', '["h2o"]'),
        *("0", "1", "1.5", *NUMBERS_ALONE),
    ),
}
TABLE = [(field, text) for field, own in BAD_VALUES.items() for text in (*EVERYWHERE, *own)]


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
