# SPDX-License-Identifier: Apache-2.0
"""``h2o-serve --speculative-config`` beside budgets, as its clients see it: by ``ngram`` and a draft model.

What the model says does not matter here: it is a tiny one of random weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.live_server import MODEL, LiveServer, live_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def server(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--kv-budget", "0.2", "--speculative-config", json.dumps(NGRAM)]
    with live_server(log, *tiny, *options) as server:
        yield server


def answer(client: openai.OpenAI, **more: Any) -> Any:
    # Of few words an answer repeats itself, so that something is found.
    few = {"ignore_eos": True, "allowed_token_ids": [300, 301]}
    prompt = [1000 + 3 * i for i in range(400)]
    fields = {"extra_body": few | more.pop("fields", {})}
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=80, **{"temperature": 0} | fields | more
    )


def test_report_counts_drafts_with_a_budget_and_without_and_in_streams(server: LiveServer) -> None:
    client = server.client()
    reports = [answer(client, fields={"kv_budget": budget}).kv_cache for budget in (0.2, 1.0)]
    *_, last = answer(client, stream=True)
    twice = answer(client, n=2, temperature=1, seed=1).kv_cache
    for report in (*reports, last.kv_cache):
        assert report["tokens_drafted"] > report["tokens_accepted"] > 0
        assert report["tokens_seen"] == 479
    assert reports[0] == last.kv_cache | {"tokens_cached": 0}
    assert reports[0]["tokens_evicted"] > 0 == reports[1]["tokens_evicted"]
    for key in ("tokens_drafted", "tokens_accepted"):
        assert twice[key] == sum(one[key] for one in twice["sequences"]) > 0


def test_vllms_metrics_count_the_drafts_of_reports(server: LiveServer) -> None:
    names = (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )
    before = [server.metric(name) for name in names]
    report = answer(server.client()).kv_cache
    for name, at, key in zip(names, before, ("tokens_drafted", "tokens_accepted"), strict=True):
        server.wait_for(name, at + report[key])


@pytest.mark.long
def test_a_draft_model_serves_beside_a_budget(
    tiny: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    """One of the same weights: it is right until an eviction leaves it another part of the prompt."""
    method = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 3}
    options = ["--kv-budget", "0.2", "--speculative-config", json.dumps(method)]
    with live_server(tmp_path / "log", *tiny, *options) as server:
        free = {"ignore_eos": True, "allowed_token_ids": None}
        reports = [
            answer(server.client(), fields=free | {"kv_budget": budget}).kv_cache
            for budget in (0.2, 1.0)
        ]
    for report in reports:
        assert report["tokens_drafted"] > 0 and report["tokens_seen"] == 479
    assert reports[0]["tokens_evicted"] > 0 == reports[1]["tokens_evicted"]
    assert reports[1]["tokens_accepted"] > 40
