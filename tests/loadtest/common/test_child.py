# SPDX-License-Identifier: Apache-2.0
"""Measuring processes: started at once, asked in turn, ended together."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from loadtest.common.child import Child

MODULE = """
import json, pathlib, sys, time
from loadtest.common.child import answer

first = json.loads(sys.stdin.readline())
pathlib.Path(first["name"]).touch()
end = time.monotonic() + 300
while not all(pathlib.Path(name).exists() for name in first["others"]):
    assert time.monotonic() < end, "they do not run at once"
    time.sleep(0.01)
print("log\\n" * first["lines"])
answer({"name": first["name"]})
for line in sys.stdin:
    answer({"echo": line.strip()})
"""


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a measuring process is told, which answers when those beside it run as well."""
    (tmp_path / "measuring.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return {"name": str(tmp_path / "one"), "others": [], "lines": 1}


def test_several_start_at_once(first: dict[str, Any], tmp_path: Path) -> None:
    names = [first["name"], str(tmp_path / "two")]
    with ExitStack() as stack:
        children = [
            # More log than a pipe holds, from each.
            Child("measuring", first | {"name": name, "others": names, "lines": 50_000}, wait=False)
            for name in names
        ]
        for child in children:
            stack.enter_context(child)
        assert [child.answered["name"] for child in children] == names
        assert [len(child.log) for child in children] == [50_002] * 2
        assert [child.request("more") for child in children] == [{"echo": "more"}] * 2
