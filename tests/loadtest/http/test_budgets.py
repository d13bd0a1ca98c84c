# SPDX-License-Identifier: Apache-2.0
"""Mixes of budgets: what is sent, and in which shares."""

import pytest

from loadtest.http.budgets import Mix, MixError


@pytest.mark.parametrize(
    ("text", "label", "fields"),
    [
        ("1.0", "kv=1", {"kv_budget": 1.0}),
        ("512t", "kv=512t", {"kv_budget_tokens": 512}),
        ("none/value+key:7", "kv=none/value+key", {"kv_policy": "value+key"}),
        ("0.2+elastic/h2o", "kv=0.2+elastic/h2o",
         {"kv_budget": 0.2, "kv_elastic": True, "kv_policy": "h2o"}),
    ],
)  # fmt: skip
def test_entry_becomes_a_label_and_body_fields(text: str, label: str, fields: object) -> None:
    (budget,) = Mix(text).budgets
    assert (budget.label, budget.fields) == (label, fields)


@pytest.mark.parametrize(
    "text", ["", "x", "0.2:0", "0.2:-1", "0.2;1.0", "0.2,", "t", "0.2/", "none+elastic", "0.2+"]
)
def test_what_is_no_mix_is_refused_with_the_entry_and_the_form(text: str) -> None:
    with pytest.raises(MixError, match="--budgets"):
        Mix(text)
