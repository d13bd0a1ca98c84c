# SPDX-License-Identifier: Apache-2.0
"""Real replicas behind the real router: a drain loses nothing, a kill only what was open there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.fleet.failures import main

pytest.importorskip("vllm_router", reason="vLLM's router is in the extra fleet")
pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_a_drain_loses_nothing_and_a_kill_what_was_open_there(tmp_path: Path) -> None:
    main(["--incidents", "drain", "kill-replica", "--seconds", "120", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.jsonl")
    drain, kill = map(json.loads, file.read_text().splitlines())
    assert drain["requests"] > 60
    assert drain["answered"] == drain["requests"]
    assert (drain["repeated"], drain["twice"]) == (0, 0)
    assert kill["answered"] + kill["broken"] == kill["requests"], "a client was refused"
    assert kill["noticed"] == kill["twice"] == 0
