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


def test_every_request_is_accounted_for() -> None:
    whole, broken = {"ttft": 0.1, "latency": 1.0}, {"ttft": 0.1, "error": "no [DONE]"}
    records = [record(number, **whole) for number in (1, 2, 3)]
    records += [record(4, **broken), record(5, error="no worker"), record(6, cut=True)]
    # The second was sent again, the third answered by both, and the warm-up has no such name.
    victim = (
        came(1) + done(1) + came(2) + came(3) + done(3) + came(4) + "Received request cmpl-8d\n"
    )
    other = came(2) + done(2) + came(3) + done(3) + came(6) * 2
    found = account(records, [victim, other])
    assert (found.requests, found.answered, found.broken) == (5, 3, 1)
    assert found.noticed == 1, "the fifth was never at the victim"
    assert (found.repeated, found.twice) == (2, 1)


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
