# SPDX-License-Identifier: Apache-2.0
"""Replicas behind vLLM's router: a drain loses nothing, a kill only what was open there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_vllm.models import default_model_dir
from loadtest.common.tiny_model import make_tiny_model
from loadtest.http.records import Record
from tests.reliability.fleet import Fleet, account, drain, kill, under_load

REPLICAS = (("--kv-budget", "0.2"),) * 2


def name(number: int) -> str:
    return f"{number:032x}"


def came(number: int) -> str:
    return f"INFO 11-22 [request_logger.py:66] Received request cmpl-{name(number)}-0: params: Sampling\n"


def done(number: int) -> str:
    return (
        f"INFO 11-22 [request_logger.py:108] Generated response cmpl-{name(number)}-0 (streaming complete): "
        "output: '', finish_reason: length\n"
    )


def record(number: int, **fields: Any) -> Record:
    return Record("kv=none", float(number), id=name(number), **fields)


def whole(number: int, ttft: float = 0.1) -> Record:
    return record(number, ttft=ttft, latency=1.0)


def test_every_request_is_accounted_for() -> None:
    records = [
        whole(1),
        whole(2, ttft=3.0),
        record(3, error="HTTPStatusError: 503: no worker"),
        record(4, ttft=0.1, error="the stream ended without [DONE]"),
        record(5, error="ConnectionRefusedError: [Errno 111] Connection refused"),
        record(6, cut=True),
    ]
    victim = came(1) + done(1) + came(2) + came(4)
    other = came(2) + done(2) + came(6)
    found = account(records, [victim, other], 0)
    assert (found.requests, found.answered, found.refused, found.broken) == (5, 2, 2, 1)
    assert found.noticed == 2, "two that failed were never at the victim"
    assert (found.repeated, found.twice) == (1, 0)
    assert found.slowest == 3.0
    assert found.errors == {
        "HTTPStatusError: : no worker": 1,
        "the stream ended without [DONE]": 1,
        "ConnectionRefusedError: Connection refused": 1,
    }


def test_answers_that_were_given_twice_are_seen() -> None:
    logs = [came(1) + done(1), came(1) + done(1) + came(2) + done(2)]
    found = account([whole(1), whole(2)], logs, 0)
    assert (found.repeated, found.twice) == (1, 1)


def test_who_comes_back_to_the_replica_after_its_restart_was_sent_again() -> None:
    assert account([whole(1)], [came(1) + came(1) + done(1)], 0).repeated == 1


def test_a_failure_of_the_router_has_no_victim() -> None:
    found = account([record(1, error="ConnectionResetError")], [came(1)], None)
    assert (found.broken, found.refused, found.noticed) == (0, 1, None)


def test_other_requests_in_the_logs_do_not_count() -> None:
    """The warm-up's, which have no such name, and those that the end of the test cut off."""
    log = came(7) * 2 + "Received request cmpl-8d1a-0: params\n"
    found = account([whole(1)], [came(1) + done(1), log], 0)
    assert (found.repeated, found.twice) == (0, 0)


@pytest.mark.e2e
@pytest.mark.long
def test_a_drain_loses_nothing_and_a_kill_what_was_open_there(tmp_path: Path) -> None:
    pytest.importorskip("vllm_router", reason="vLLM's router is in the extra fleet")
    model = make_tiny_model(tmp_path / "model", default_model_dir())
    with Fleet(model, tmp_path, REPLICAS) as fleet:
        drained = under_load(fleet, drain, 120, tmp_path / "drain.jsonl", salt=0)
        killed = under_load(fleet, kill, 120, tmp_path / "kill.jsonl", salt=1)
    assert drained.requests > 60
    assert drained.answered == drained.requests
    assert (drained.repeated, drained.twice) == (0, 0)
    assert killed.answered + killed.broken == killed.requests, "a client was refused"
    assert killed.noticed == killed.twice == 0
