# SPDX-License-Identifier: Apache-2.0
"""The quality run against a server, here a mock: what is asked, and what is made of it."""

from __future__ import annotations

from pathlib import Path

from loadtest.quality.__main__ import measure
from loadtest.quality.generation import GenerationOutput, GenerationRequest, Task
from loadtest.quality.live import Live
from loadtest.quality.rows import latest, read_rows
from loadtest.quality.settings import parse_arguments
from tests.loadtest.conftest import FAST, StartMock


def test_answers_come_with_what_was_held(start_mock: StartMock) -> None:
    live = Live(start_mock(*FAST))
    found: dict[str, GenerationOutput] = {}
    fields = {"kv_policy": "h2o", "kv_budget": 0.2}
    requests = {
        "text": GenerationRequest("Once upon a time " * 90, 12),
        "chat": GenerationRequest("Hello?", 5, chat=True),
    }
    live.run([Task(name, one, fields) for name, one in requests.items()], found.__setitem__)
    live.close()
    assert found["text"].text
    assert found["chat"].text
    assert found["chat"].tokens == 5
    assert found["text"].held < 1.0
    assert live.count("seven letters") > 0


def test_what_a_server_cannot_do_is_left_out(start_mock: StartMock, tmp_path: Path) -> None:
    url = start_mock(*FAST)
    options = ["--url", url, "--quick", "--policies", "h2o", "--out", str(tmp_path)]
    path = measure(parse_arguments(options))
    runs, rows = read_rows([path])
    assert {row.measure for row in rows} == {"retrieval", "long"}
    assert {row.description["way"] for row in rows if row.measure == "retrieval"} == {
        "before",
        "end",
    }
    assert url not in path.read_text()
    # What is there is not asked again.
    assert measure(parse_arguments([*options, "--resume", str(path)])) == path
    assert len(latest(read_rows([path])[1])) == len(rows) == len(read_rows([path])[1])
    assert runs[0]["settings"]["model"]
