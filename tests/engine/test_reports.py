# SPDX-License-Identifier: Apache-2.0
"""Reports on the real scheduler and a tiny real pool: who gets one, and what a server gets of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from h2o_vllm.blocks import request_state
from h2o_vllm.blocks.report import report_from_values, request_report
from tests.engine.scheduling import Rig

PROMPT = list(range(1000, 1200))


def test_n_greater_than_one_reports_every_choice(model_dir: str) -> None:
    rig = Rig(model_dir, 60)
    for index in range(3):
        rig.add(f"{index}_parent", PROMPT[:100], {"kv_budget": 0.5}, max_tokens=5 + index)
    rig.run()
    assert set(rig.reports["2_parent"]) == {"0", "1", "2"}


def test_stop_strings_get_a_report_with_every_output(model_dir: str) -> None:
    rig = Rig(model_dir, 60)
    rig.add("a", PROMPT[:100], {"kv_budget": 0.5}, max_tokens=5, stop=["x"])
    rig.step()
    rig.step()
    assert "a" in rig.reports
    rig.run()


def test_a_server_gets_what_a_report_is_made_of(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request with stop strings any output may be the last: no report is made of those that are not."""
    built: list[object] = []

    def counting(*args: Any) -> dict[str, object]:
        built.append(args)
        return request_report(*args)

    monkeypatch.setattr(request_state, "request_report", counting)
    rig = Rig(model_dir, 60, metered=True, kv_min_tokens=16)
    rig.add("0_a", PROMPT, {"kv_budget": 0.2}, max_tokens=40, stop=["x"])
    rig.add("1_a", PROMPT[::-1], {"kv_budget_tokens": 60}, max_tokens=30, stop=["x"])
    compared = 0
    while not any(state is None for state in map(rig.blocks.eviction_state, ("0_a", "1_a"))):
        rig.step()
        for index in ("0", "1"):
            state = rig.blocks.eviction_state(f"{index}_a")
            values = rig.reports.get(f"{index}_a", {}).get(index)
            if state is None or values is None:
                continue
            # As the front end gets them.
            values = msgspec.msgpack.decode(msgspec.msgpack.encode(values))
            seen, at, *drafts = values[-7], values[-3], *values[-2:]
            expected = request_report(
                state.budget, rig.block_size, seen, state.holes, state.peak_blocks, 0, at, *drafts
            )
            assert at in (None, state.prompt_tokens)
            assert report_from_values(values) == expected
            compared += 1
    assert compared > 40
    assert len(built) == 1, "only of the one that has ended"
    rig.run()
    # The last choice carries the other one's report.
    assert all(isinstance(report, dict) for report in rig.reports["0_a"].values())
    assert set(rig.reports["0_a"]) == {"0", "1"}
