# SPDX-License-Identifier: Apache-2.0
"""What a start shows: three lines for a newcomer, and of vLLM's what takes long or says how much fits."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
from typing import Any

import pytest

from h2o_vllm.config.keys import QUIET
from h2o_vllm.engine import quiet
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


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the handler of vLLM's loggers lets through."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [Handler()])
    monkeypatch.setenv(QUIET, "")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("PYTHONWARNINGS", "")
    return said


def speak() -> None:
    for name, level, text in (
        ("vllm.entrypoints.launchers.launcher", logging.INFO, "Route: %s"),
        ("vllm.v1.worker.cpu_worker", logging.WARNING, "%s is not found in LD_PRELOAD. For best"),
        ("vllm.v1.worker.cpu_worker", logging.WARNING, "something else %s"),
        ("vllm.v1.core.kv_cache_utils", logging.INFO, "CPU KV cache size: %s tokens"),
        ("vllm.h2o_vllm.server.serve", logging.INFO, "H2O: %s"),
        ("vllm.config", logging.ERROR, "wrong: %s"),
    ):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.log(level, text, "x")


def test_a_start_shows_no_lines_that_its_reader_can_do_nothing_about(log: list[str]) -> None:
    quiet.prepare(wanted=True)
    quiet.begin()
    quiet.begin()
    speak()
    assert log == ["something else x", "CPU KV cache size: x tokens", "H2O: x", "wrong: x"]
    quiet.end()
    speak()
    assert len(log) == 4 + 6


def test_who_asks_for_a_log_gets_all_of_it(log: list[str]) -> None:
    quiet.prepare(wanted=False)
    assert QUIET not in os.environ
    quiet.begin()
    speak()
    assert len(log) == 6


def test_warnings_that_are_dropped_are_still_vllms() -> None:
    """Else the list is out of date."""
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    files = ("config/vllm.py", "platforms/cpu.py", "triton_utils/importing.py",
             "utils/system_utils.py", "v1/core/sched/scheduler.py", "config/scheduler.py",
             "v1/worker/cpu_worker.py")  # fmt: skip
    source = " ".join((folder / name).read_text() for name in files if (folder / name).exists())
    text = source.replace('"\n', "").replace("  ", "")
    assert [start for start in quiet.IDLE if start[:25] not in text] == []
