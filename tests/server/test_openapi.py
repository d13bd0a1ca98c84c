# SPDX-License-Identifier: Apache-2.0
"""The server's API page describes the budget fields, with this server's ranges."""

import re

from fastapi import FastAPI

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.settings import REQUEST_FIELDS
from h2o_vllm.server.config_route import PATH
from h2o_vllm.server.openapi import describe_fields, fields_of
from tests.server.vllm_like import CompletionRequest, Engine, build, client_of


def test_every_field_is_described() -> None:
    fields = fields_of(H2OConfig(kv_budget_min=0.05, kv_protect_max=64, kv_protect="system"))
    assert tuple(fields) == REQUEST_FIELDS
    assert all(field["description"] for field in fields.values())
    assert fields["kv_budget"]["anyOf"][0] == {"type": "number", "minimum": 0.05, "maximum": 1.0}
    assert fields["kv_policy"]["default"] == "value+end+key"
    pattern = fields["kv_policy"]["anyOf"][0]["pattern"]
    for name, accepted in (
        ("auto", True),
        ("value+key", True),
        ("key+value", False),
        ("predicted", False),
    ):
        assert bool(re.search(pattern, name)) == accepted
    assert fields["kv_protect"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 64}
    assert fields["kv_protect"]["default"] == "system"
    assert fields["kv_elastic"]["anyOf"][0] == {"type": "boolean"}
    assert fields["kv_elastic"]["default"] is False
    assert fields["kv_evict_from"]["anyOf"][0] == {"type": "integer", "minimum": 1}


def test_bodies_of_the_routes_that_take_them_have_them() -> None:
    application = FastAPI()

    @application.post("/v1/completions")
    async def completions(request: CompletionRequest) -> None: ...

    @application.post("/tokenize")
    async def tokenize(request: dict[str, str]) -> None: ...

    describe_fields(application, H2OConfig())
    for page in (application.openapi(), application.openapi()):
        properties = page["components"]["schemas"]["CompletionRequest"]["properties"]
        assert set(REQUEST_FIELDS) | {"prompt"} <= set(properties)
    assert "kv_budget" not in str(page["paths"]["/tokenize"])


async def test_the_configuration_says_what_applies_and_what_the_pool_holds() -> None:
    app = build(Engine(), H2OConfig(kv_budget=0.2, kv_settle_tokens=512))
    # A hybrid's: vLLM's own number is that of its smallest group.
    app.state.vllm_config.cache_config.effective_attention_block_size = 96
    async with client_of(app) as client:
        said = (await client.get(PATH)).json()
    assert {name: said["kv_cache"][name] for name in ("block_size", "num_tokens")} == {
        "block_size": 96,
        "num_tokens": 9 * 96,
    }
    defaults = said["defaults"]
    assert [defaults[name] for name in ("kv_policy", "kv_protect", "kv_delay")] == ["key", 0, None]
