# SPDX-License-Identifier: Apache-2.0
"""Other systems beside ours: what runs is compared, what does not says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.engine import peers
from loadtest.engine.peers_run import SYSTEMS
from loadtest.engine.workloads import Start

ORIGIN = {"command": "c", "machine": "m", "commit": "1", "date": "d", "versions": {"vllm": "1"}}


def test_every_other_system_can_be_started() -> None:
    assert [*peers.ENGINES, *SYSTEMS] == list(peers.SYSTEMS)


def test_llama_cpp_gets_no_other_model_than_the_others() -> None:
    def file_of(*options: str) -> str:
        return peers.gguf_of(peers.parse_arguments(options))

    assert file_of().endswith(".gguf")
    assert file_of("--model", "other") == ""
    assert file_of("--model", "other", "--gguf", "other.gguf") == "other.gguf"


def test_the_table_compares_within_a_round_and_says_what_did_not_run() -> None:
    def row(system: str, turn: int, speed: float) -> dict[str, Any]:
        return ORIGIN | {
            "system": system, "round": turn, "tok_per_s": speed, "first_token_s": 1.5, "version": "x 1",
            "dtype": "float32",
        }  # fmt: skip

    failed = ORIGIN | {"system": "llama.cpp", "round": 0, "failed": "no such module"}
    rows = [row("stock", 0, 10), row("h2o", 0, 30), row("stock", 1, 20), row("h2o", 1, 40), failed]
    text = peers.markdown(rows)
    assert (
        "| h2o_vllm, `kv_budget` 0.2 | 35.0 (30.0-40.0) | 2.50 (2.00-3.00) | 1.5 (1.5-1.5) | x 1 |"
        in text
    )
    assert "| llama.cpp, one by one | did not run: no such module |  |  |  |" in text


def test_our_engines_are_told_all_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    def start(module: str, first: dict[str, Any]) -> None:
        told.append(first)
        raise SystemExit("no engine")

    monkeypatch.setattr(peers, "Child", start)
    for system in peers.ENGINES:
        assert peers.measure(system, peers.parse_arguments([])) == {"failed": "no engine"}
    assert [first.keys() for first in told] == [Start.__annotations__.keys()] * len(told)


@pytest.mark.e2e
@pytest.mark.slow
def test_transformers_serves_the_same_requests(tiny: list[str], tmp_path: Path) -> None:
    peers.main(["--systems", "transformers", "kvpress-snapkv", *tiny, "--scale", "0.1"])
    (file,) = tmp_path.glob("peers-cpu-*.jsonl")
    served, failed = map(json.loads, file.read_text().splitlines())
    assert served["tok_per_s"] > 0 and served["first_token_s"] > 0
    assert served["version"].startswith("transformers ")
    # It is not installed here.
    assert failed["failed"] == "ModuleNotFoundError: No module named 'kvpress'"
