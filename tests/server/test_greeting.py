# SPDX-License-Identifier: Apache-2.0
"""The three lines with which a start ends."""

import argparse
import json
import shlex
from typing import Any

import pytest

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server.greeting import greeting
from tests.processes import run


def lines(address: str = "http://127.0.0.1:8000", **changes: Any) -> list[str]:
    args = {
        "uds": None, "root_path": None, "served_model_name": ["It's"], "model": "m", "api_key": None,
        "kv_playground": True, "kv_budget_min": 0.01, "kv_budget_max": 1.0,
    }  # fmt: skip
    return greeting(argparse.Namespace(**(args | changes)), address)


def test_three_lines_say_where_how_to_ask_and_how_to_stop() -> None:
    page, ask, stop = lines()
    assert page.endswith(" http://127.0.0.1:8000/h2o/") and stop.endswith("Ctrl-C")
    curl = shlex.split(ask.partition("ask:")[2])
    assert curl[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(curl[-1])["model"] == "It's"


def test_the_request_evicts() -> None:
    """Sent by a shell, its prompt is longer than what is protected, and its answer than the delay."""
    command = lines(kv_budget_min=0.3)[1].partition("ask:")[2]
    said = run("sh", "-c", command.replace("curl -s", "printf '%s\\n'", 1)).stdout
    body = json.loads(said.splitlines()[-1])
    config = H2OConfig()
    assert len(body["messages"][0]["content"].split()) > 400 and body["kv_budget"] == 0.3
    assert body["max_tokens"] > config.kv_delay


@pytest.mark.parametrize(
    ("address", "changes", "part"),
    [
        ("http://0.0.0.0:80", {}, "curl -s http://127.0.0.1:80/v1"),
        ("https://[::1]:80", {"root_path": "/a"}, "curl -s https://[::1]:80/a/v1"),
        ("http://h:1", {"root_path": "a"}, "curl -s http://h:1/v1"),
        ("unix:/s", {"uds": "/s", "root_path": "/v1"}, "/s http://localhost/v1/v1/chat"),
        ("unix:/s 1", {"uds": "/s 1"}, "curl -s --unix-socket '/s 1' http://localhost/v1"),
        ("http://h:1", {"api_key": ["k"]}, "-H 'Authorization: Bearer KEY'"),
        ("http://h:1", {"served_model_name": None}, '"model": "m"'),
    ],
)
def test_the_request_reaches_the_server_as_it_was_started(
    address: str, changes: dict[str, Any], part: str
) -> None:
    assert part in lines(address, **changes)[1]
