# SPDX-License-Identifier: Apache-2.0
"""Law 8 for what a client can name (``/v1/responses`` takes ids as they come) and multiply (``n``)."""

import pytest

from h2o_vllm.engine.core.parallel_choices import MAX_CHOICES, MAX_IDLE_PARENTS, parent_request
from tests.engine.scheduling import Rig

PROMPT = list(range(1000, 1100))


@pytest.mark.parametrize(
    "request_id",
    [
        "9" * 5000 + "_0", "9" * 100_000, "_", "__", "0_", "-1_x", "²_x", "٣_x", "１_x", "+1_x",
        "1e9_x", " 1_x", "\x00_",
    ],
    ids=lambda text: ascii(text[:8]),
)  # fmt: skip
def test_no_request_id_ends_the_engine(model_dir: str, request_id: str) -> None:
    rig = Rig(model_dir, 60)
    rig.add(request_id, PROMPT, {"kv_budget": 0.5}, max_tokens=5, stop=["x"])
    rig.add("other", PROMPT, {"kv_budget": 0.5}, max_tokens=5)
    rig.run()
    assert len(rig.tokens["other"]) == 5
    (report,) = rig.reports[request_id].values()
    assert report["tokens_seen"] == 104


def test_ids_of_choices_are_still_understood() -> None:
    assert parent_request("3_cmpl-a_b-0") == ("cmpl-a_b-0", 3)
    assert parent_request("16383_x") == ("x", 16383)
    assert parent_request("cmpl-a_b-0") is None


def test_reports_do_not_grow_with_the_square_of_n(model_dir: str) -> None:
    count = 3 * MAX_CHOICES
    rig = Rig(model_dir, 60, max_num_seqs=64)
    for index in range(count):
        rig.add(f"{index}_parent", PROMPT[:20], {"kv_budget": 0.5}, max_tokens=1 + index % 3)
    rig.run()
    assert len(rig.reports) == count
    for index in range(count):
        reports = rig.reports[f"{index}_parent"]
        assert str(index) in reports
        assert len(reports) <= MAX_CHOICES + 1
    assert max(map(len, rig.reports.values())) >= MAX_CHOICES


def test_finished_requests_with_several_choices_are_forgotten(model_dir: str) -> None:
    rig = Rig(model_dir, 60)
    rig.add("0_old", PROMPT[:20], max_tokens=2)
    rig.add("1_old", PROMPT[:20], max_tokens=100)
    for number in range(3 * MAX_IDLE_PARENTS):
        rig.add(f"0_{number}", PROMPT[:20], max_tokens=1)
        rig.add(f"1_{number}", PROMPT[:20], max_tokens=1)
        rig.step()
    for _ in range(4 * MAX_IDLE_PARENTS):
        rig.step()
    rig.add("0_last", PROMPT[:20], max_tokens=1)
    rig.run()
    assert len(rig.scheduler._choices.reports) <= MAX_IDLE_PARENTS + 1
    assert not rig.scheduler._choices.running
    # However many came after it, whoever was still running has kept its first choice's report.
    assert set(rig.reports["1_old"]) == {"0", "1"}


def test_aborted_choices_are_forgotten_too(model_dir: str) -> None:
    from vllm.v1.request import RequestStatus

    rig = Rig(model_dir, 60)
    for index in range(4):
        rig.add(f"{index}_p", PROMPT, {"kv_budget": 7} if index == 3 else None, max_tokens=50)
    rig.step()
    rig.scheduler.finish_requests(["0_p", "1_p"], RequestStatus.FINISHED_ABORTED)
    rig.run()
    assert not rig.scheduler._choices.running
