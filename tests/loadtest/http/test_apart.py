# SPDX-License-Identifier: Apache-2.0
"""Prefill apart from decode: what is compared, and what the table says."""

from __future__ import annotations

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.resolve import resolve
from loadtest.http.apart import VARIANTS, parse_arguments, table


def test_variants_evict_where_their_names_say() -> None:
    prefill = H2OConfig(kv_evicts_not_because="for others", kv_hands_over=True)
    there = [resolve(prefill, fields).evicts for _, fields in VARIANTS.values()]
    assert there == [False, False, True, True]
    decode = H2OConfig(kv_collects_not_because="no attention", kv_hands_over=True)
    here = [resolve(decode, fields).evicts for _, fields in VARIANTS.values()]
    assert here == [False, True, True, True]
    assert [apart for apart, _ in VARIANTS.values()] == [True, True, True, False]


def test_table_has_medians_and_ranges_of_each_variant() -> None:
    rows = [
        {"variant": name, "tok_per_s": speed, "moved_mb": 10 * place, "held": 300.4}
        for place, name in enumerate(VARIANTS)
        for speed in (10.0, 30.0, 11.0)
    ]
    lines = table(rows).splitlines()
    assert lines[2] == "| apart, full KV | 11.0 (10.0-30.0) | 0.0 (0.0-0.0) | 300 (300-300) |"
    assert len(lines) == 2 + len(VARIANTS)
    assert parse_arguments(["--", "--dtype", "bfloat16"]).options == ["--dtype", "bfloat16"]
