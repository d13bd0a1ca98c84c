# SPDX-License-Identifier: Apache-2.0
"""The table of settings: a row says all, and is found wherever a setting shows."""

from dataclasses import dataclass, fields
from typing import Any

import pytest
from pydantic import TypeAdapter

from h2o_vllm.config.fields import rows_of, setting
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_budget import RequestBudget
from h2o_vllm.config.resolve import resolve
from h2o_vllm.config.settings import FIELDS, OPTIONS, EngineLimits
from h2o_vllm.errors import BudgetError
from h2o_vllm.server.cli import _OwnParser
from h2o_vllm.server.config_route import Defaults
from h2o_vllm.server.openapi import fields_of, kind_of
from tests.server.conftest import engine_report


@dataclass(frozen=True)
class Table:
    kv_number: int = setting(3, "A number.", low=1, high=9)
    kv_share: float | None = setting(None, "A share.", high=1, low_open=True)
    kv_word: str = setting("a", "A word.", words=("a", "b"))
    kv_either: int | str = setting(0, "One or the other.", high=5, words=("all",))
    kv_flag: bool = setting(False, "A flag.")
    no_row: str = ""


ROWS = {row.name: row for row in rows_of(Table)}


def test_a_row_knows_where_it_stands() -> None:
    assert list(ROWS) == ["kv_number", "kv_share", "kv_word", "kv_either", "kv_flag"]
    assert [row.kind for row in ROWS.values()] == [int, float, str, int, bool]
    assert [row.optional for row in ROWS.values()] == [False, True, False, False, False]
    assert [row.default for row in ROWS.values()] == [3, None, "a", 0, False]
    assert ROWS["kv_either"].flag == "--kv-either"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("kv_number", [1, 9], [0, 10, 1.0, True, "1", None]),
        ("kv_share", [0.1, 1], [0, 1.1, "x", True, float("nan")]),
        ("kv_word", ["a", "b"], ["c", 1, None]),
        ("kv_either", [0, 5, "all"], [6, -1, "none", 1.5]),
        ("kv_flag", [True, False, 0, 1], [2, "false", None]),
    ],
)
def test_a_row_checks_its_values_and_the_schema_says_the_same(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    row = ROWS[name]
    schema = TypeAdapter(kind_of(row, row.words))
    for value in good:
        assert row.check(value) == value
        schema.validate_python(value)
    for value in bad:
        with pytest.raises(BudgetError) as caught:
            row.check(value)
        assert caught.value.parameter == name
    with pytest.raises(ValueError, match="validation error"):
        schema.validate_python(bad[0])


def test_a_server_may_narrow_a_range() -> None:
    assert ROWS["kv_share"].check(0.2, 0.2, 0.5) == 0.2
    for value in (0.1, 0.6):
        with pytest.raises(BudgetError, match=r"in \[0.2, 0.5\]"):
            ROWS["kv_share"].check(value, 0.2, 0.5)


def test_every_setting_is_a_row_and_shows_in_every_place() -> None:
    limits = {each.name for each in fields(EngineLimits)}
    options = [each.name for each in fields(H2OConfig) if each.name not in limits]
    assert [row.name for row in OPTIONS] == options
    text = _OwnParser().format_help()
    assert all(row.flag in text for row in OPTIONS)
    asked = {row.name for row in OPTIONS if row.per_request}
    assert set(Defaults.model_fields) == asked == set(H2OConfig().applied)
    assert fields_of(H2OConfig()).keys() == FIELDS.keys() >= asked
    assert {row.reported for row in FIELDS.values()} <= {*engine_report(), ""}


def test_every_attribute_of_a_budget_is_a_row_or_follows_from_several() -> None:
    derived = {"fraction", "tokens", "min_fraction", "max_fraction", "floor"}
    derived |= {"recent_of_answers", "evict_from", "trace", "end", "end_from"}
    rows = {row.attribute for row in FIELDS.values()} - {""}
    assert rows | derived == {each.name for each in fields(RequestBudget)}


BOUNDED = {name: row for name, row in FIELDS.items() if row.is_bounded and not row.low_open}


@pytest.mark.parametrize("row", BOUNDED.values(), ids=BOUNDED)
def test_both_ends_of_a_range_are_accepted_and_none_beyond(row: Any) -> None:
    for value in (row.low, row.high):
        assert getattr(resolve(H2OConfig(), {row.name: value}), row.attribute) == value
    for value in (row.low - 1, row.high + 1):
        with pytest.raises(BudgetError):
            resolve(H2OConfig(), {row.name: value})
