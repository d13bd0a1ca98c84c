# SPDX-License-Identifier: Apache-2.0
"""What is written beside a measured number."""

from __future__ import annotations

import sys

import pytest

from loadtest.common.machine import describe_run


def test_a_command_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        "--out",
        "/home/me/results",
        "--model=/models/tiny",
        "--name",
        "a=b",
        "--xsum",
        "x/y",
    ]
    monkeypatch.setattr(sys, "argv", ["bench.py", *options])
    assert describe_run("loadtest.engine.bench")["command"] == (
        "python -m loadtest.engine.bench --out results --model=tiny --name a=b --xsum x/y"
    )
