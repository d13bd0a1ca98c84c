# SPDX-License-Identifier: Apache-2.0
"""``kv_protect``: what a request may ask for, and the number of tokens it means."""

from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_fields import FEW_PROTECTED
from h2o_vllm.config.resolve import resolve, resolve_for
from h2o_vllm.errors import BudgetError, ConfigError


@pytest.mark.parametrize(
    ("default", "limit", "asked", "prompt", "tokens"),
    [
        (0, None, None, 100, 0),
        (0, None, 40, 100, 40),
        (0, None, 400, 100, 100),
        (0, None, "prompt", 100, 100),
        (0, 100, "prompt", 100, 100),
        (0, 0, 0, 100, 0),
        (30, None, None, 100, 30),
        (30, None, None, 20, 20),
        (30, None, 0, 100, 0),
        ("prompt", None, None, 100, 100),
        # A default never refuses a request: it protects as much as is allowed.
        ("prompt", 64, None, 100, 64),
        ("system", None, None, 100, 0),
        ("task", None, None, 100, 0),
        (None, None, None, 512, 512),
        (None, None, None, 513, 1),
        (None, 64, None, 64, 64),
        (None, 64, None, 65, 1),
        ("system", None, 7, 100, 7),
        (0, None, "ends", 512, 512),
        (0, None, "ends", 513, 1),
        (0, 0, "ends", 100, 0),
        ("ends", 64, None, 65, 1),
    ],
)
def test_the_engine_gets_a_number(
    default: Any, limit: int | None, asked: Any, prompt: int, tokens: int
) -> None:
    config = H2OConfig(kv_budget=0.2, kv_protect=default, kv_protect_max=limit)
    budget = resolve_for(config, {} if asked is None else {"kv_protect": asked}, prompt)
    assert type(budget.protect) is int and budget.protect == tokens
    assert H2OConfig.from_mapping(config.to_mapping()) == config


def test_what_is_short_depends_on_the_floor_and_nothing_is_that_settles() -> None:
    low = H2OConfig(kv_budget=0.2, kv_min_tokens=16)
    assert [resolve_for(low, None, tokens).protect for tokens in (64, 65)] == [64, 1]
    assert resolve_for(low, {"kv_budget": 1.0}, 64).protect == 0, "nothing is evicted"
    settles = {"kv_budget": 0.2, "kv_policy": "later", "kv_settle_tokens": 512}
    assert resolve_for(H2OConfig(), settles, 100).protect == 0


@pytest.mark.parametrize(("limit", "end"), [(None, 511), (64, 63), (0, 0)])
def test_the_end_is_as_long_as_a_short_prompt(limit: int | None, end: int) -> None:
    config = H2OConfig(kv_budget=0.2, kv_protect="ends", kv_protect_max=limit)
    budget = resolve_for(config, {}, 2000)
    assert budget.end == end
    assert budget.recent == (0.8 if end else 0.25), "an answer goes on from its newest tokens"
    assert resolve_for(config, {"kv_budget": 1.0}, 2000).end == 0, "nothing is evicted"


def test_segments_settle_wherever_a_prompt_ends() -> None:
    settles = {"kv_budget": 0.2, "kv_policy": "later", "kv_settle_tokens": 512}
    budget = resolve_for(H2OConfig(kv_protect="ends"), settles, 900)
    assert (budget.settle, budget.protect, budget.end) == (512, 0, 0)


def test_a_server_gets_the_word() -> None:
    assert resolve(H2OConfig(kv_protect="system"), None).protect == "system"
    assert resolve(H2OConfig(), {"kv_protect": "system"}).protect == "system"


@pytest.mark.parametrize(
    ("limit", "asked", "says"),
    [
        (None, -1, r"in \[0, 2147483647\], 'prompt', 'system', 'task' or 'ends', got -1"),
        (64, 65, r"in \[0, 64\], 'prompt', 'system', 'task' or 'ends', got 65"),
        *(
            (None, value, "kv_protect must be an integer in")
            for value in (True, 1.0, "all", "", [])
        ),
        (64, "prompt", r"at most 64 tokens here \(the prompt has 100\), got 'prompt'"),
        (None, "system", "only a chat on a server has roles"),
        (None, "task", "only a chat on a server has roles"),
    ],
)
def test_a_bad_value_names_field_and_range(limit: int | None, asked: Any, says: str) -> None:
    with pytest.raises(BudgetError, match=says) as raised:
        resolve_for(H2OConfig(kv_protect_max=limit), {"kv_protect": asked}, 100)
    assert raised.value.parameter == "kv_protect"


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_protect": -1}, "--kv-protect"),
        ({"kv_protect": "question"}, "--kv-protect"),
        ({"kv_protect": 1.5}, "--kv-protect"),
        ({"kv_protect_max": -1}, "--kv-protect-max"),
        ({"kv_protect_max": "prompt"}, "--kv-protect-max"),
        ({"kv_protect": 65, "kv_protect_max": 64}, "--kv-protect 65 is larger than"),
    ],
)
def test_bad_options_end_the_start(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        H2OConfig.from_mapping(options)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, None),
        ({"kv_protect_max": 7}, 7),
        ({"kv_budget_max": 0.5, "kv_budget": 0.5}, FEW_PROTECTED),
        ({"kv_budget_max": 0.5, "kv_budget": 0.5, "kv_protect": 5000}, 5000),
        ({"kv_budget_max": 0.5, "kv_budget": 0.5, "kv_protect": "prompt"}, None),
        ({"kv_budget_max": 0.5, "kv_budget": 0.5, "kv_protect": "ends"}, FEW_PROTECTED),
        ({"kv_budget_max": 0.5, "kv_budget": 0.5, "kv_protect_max": 7}, 7),
    ],
)
def test_who_bounds_budgets_bounds_protection_as_well(
    options: dict[str, Any], limit: int | None
) -> None:
    config = H2OConfig(**options)
    assert config.protect_limit == limit
    if limit is None:
        assert resolve_for(config, {"kv_protect": "prompt"}, 9000).protect == 9000
        return
    assert resolve_for(config, {"kv_protect": "prompt"}, limit).protect == limit
    for asked in ("prompt", limit + 1):
        with pytest.raises(BudgetError, match=str(limit)):
            resolve_for(config, {"kv_protect": asked}, limit + 1)
