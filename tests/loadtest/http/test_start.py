# SPDX-License-Identifier: Apache-2.0
"""How long servers take to start: which starts when, and what the table says."""

from __future__ import annotations

from loadtest.http.start import OPTIONS, SERVERS, parse_arguments, planned, table


def test_servers_take_turns_and_the_first_round_is_extra() -> None:
    plan = list(planned(["a", "b"], 2))
    assert plan == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_table_has_medians_and_ranges_of_each_server() -> None:
    times = {"ours": (10.0, 30.0, 11.0), "vllm": (40.0, 50.0, 60.0)}
    rows = [
        {"server": name, "start_s": seconds, "cpu_s": 2 * seconds}
        for name, found in times.items()
        for seconds in found
    ]
    lines = table(rows).splitlines()
    assert lines[2] == "| `ours` | 11.0 (10.0-30.0) | 22.0 (20.0-60.0) |"
    assert lines[3] == "| `vllm` | 50.0 (40.0-60.0) | 100.0 (80.0-120.0) |"
    assert len(lines) == 4


def test_options_of_the_servers_stand_behind_two_dashes() -> None:
    assert parse_arguments([]).options == []
    args = parse_arguments(["--rounds", "1", "--", "--dtype", "bfloat16"])
    assert args.options == ["--dtype", "bfloat16"]
    assert args.servers == [*SERVERS]
    # Both are given the same: what one of them alone knows would end the other.
    assert not any("kv-budget" in option for option in OPTIONS)
