# SPDX-License-Identifier: Apache-2.0
"""Reports on the real scheduler and a tiny real pool: who gets one."""

from __future__ import annotations

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
