# SPDX-License-Identifier: Apache-2.0
"""The three lines with which a start ends."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

import pytest

from h2o_vllm.server.greeting import greeting


def lines(address: str = "http://127.0.0.1:8000", **changes: Any) -> list[str]:
    args = {
        "uds": None, "root_path": None, "served_model_name": ["It's"], "model": "m", "api_key": None,
        "kv_playground": True,
    }  # fmt: skip
    return greeting(argparse.Namespace(**(args | changes)), address)


def test_three_lines_say_where_how_to_ask_and_how_to_stop() -> None:
    page, ask, stop = lines()
    assert page.endswith(" http://127.0.0.1:8000/h2o/") and stop.endswith("Ctrl-C")
    curl = shlex.split(ask.partition("ask:")[2])
    assert curl[:3] == ["curl", "-s", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(curl[-1])["model"] == "It's"


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
