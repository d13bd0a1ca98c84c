# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of a real server: metrics, and what it says of itself.

The server has two data-parallel engines where there is a core for each.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from h2o_vllm.metrics.table import exposed_names
from h2o_vllm.policy.policy import joinable_ranks, policy_names
from loadtest.http.generator import Generator
from loadtest.http.options import LoadSettings
from tests.server.live_server import KEY, MODEL, LiveServer, live_server

pytestmark = [pytest.mark.alone, pytest.mark.e2e, pytest.mark.slow]

LONG = [1000 + 7 * i for i in range(1500)]
"""A prompt of exactly 1500 tokens."""


CORES = sorted(os.sched_getaffinity(0))[:2]
ENGINES = len(CORES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Iterator[LiveServer]:
    options = [*tiny, "--kv-budget", "0.9", "--kv-budget-max", "0.9"]
    options += ["--data-parallel-size", str(ENGINES), "--api-server-count", "1"]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES))}
    log = tmp_path_factory.mktemp("server") / "log"
    with live_server(log, *options, environment=binding) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


def complete(client: openai.OpenAI, prompt: Any = "Hello", **fields: Any) -> Any:
    options = {"max_tokens": fields.pop("max_tokens", 8), "stream": fields.pop("stream", False)}
    return client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, extra_body=fields, **options
    )


def test_metrics_follow_what_is_evicted(server: LiveServer, client: openai.OpenAI) -> None:
    tokens, blocks, timed = (
        server.metric(f"h2o:{name}")
        for name in ("evicted_tokens_total", "freed_blocks_total", "eviction_seconds_count")
    )
    stream = complete(client, LONG, max_tokens=500, ignore_eos=True, kv_budget=0.2, stream=True)
    full = held = 0.0
    # The engine reports with a delay.
    for _ in stream:
        full, held = server.metrics("h2o:kv_tokens_full", "h2o:kv_tokens_held")
        if full >= 1500 and held < full:
            break
    assert full >= 1500
    assert 0.2 * full <= held <= 0.25 * full
    report = list(stream)[-1].kv_cache
    server.wait_for("h2o:evicted_tokens_total", tokens + report["tokens_evicted"])
    server.wait_for("h2o:freed_blocks_total", blocks + report["blocks_freed"])
    assert server.metric("h2o:eviction_seconds_count") > timed
    # Nothing runs any more.
    server.wait_for("h2o:kv_tokens_full", 0)
    server.wait_for("h2o:kv_tokens_held", 0)


def test_every_engine_evicts_and_says_so(server: LiveServer, client: openai.OpenAI) -> None:
    def one(i: int) -> dict[str, Any]:
        answer = complete(client, [1000 + i] * (400 + i), ignore_eos=True, kv_budget=0.3)
        report: dict[str, Any] = answer.kv_cache
        return report

    name, engines = "h2o:evicted_tokens_total", [str(i) for i in range(ENGINES)]
    before = {engine: server.metric(name, engine=engine) for engine in engines}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(one, range(4)))
    server.wait_for(name, sum(before.values()) + sum(r["tokens_evicted"] for r in reports))
    assert all(server.metric(name, engine=engine) > before[engine] for engine in engines)


def test_a_scraper_that_prefers_openmetrics_finds_the_same_names(server: LiveServer) -> None:
    # prometheus_client's own OpenMetrics writer would turn the colons into underscores.
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4"}
    text = httpx.get(f"{server.url}/metrics", headers=accept).text
    for name in exposed_names() | {"vllm:num_requests_running"}:
        assert f"\n{name}{{" in text, name


@pytest.mark.parametrize(
    ("reason", "path", "fields"),
    [
        ("value", "/v1/completions", {"kv_budget": 7}),
        ("conflict", "/v1/completions", {"kv_budget": 0.5, "kv_budget_tokens": 200}),
        ("unknown_field", "/v1/chat/completions", {"kv_bugdet": 0.5}),
        ("unsupported", "/generative_scoring", {"kv_budget": 0.5}),
    ],
)
def test_metrics_count_rejections(
    server: LiveServer, reason: str, path: str, fields: dict[str, Any]
) -> None:
    name = "h2o:budget_rejections_total"
    before = server.metric(name, reason=reason)
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
    assert server.post(path, body | fields).status_code == 400
    assert server.post(path, body | fields, key="wrong").status_code == 401
    assert server.metric(name, reason=reason) == before + 1


def test_load_generator_reads_what_the_server_sends(server: LiveServer) -> None:
    settings = LoadSettings(api_key=KEY, budgets="0.2,none", prompt_tokens=400, output_tokens=16)
    generator = Generator(settings, server.url)
    generator.prepare()
    evicting, whole = (generator.send(number, generator.now()) for number in range(2))
    for record in (evicting, whole):
        assert record.error is None
        assert 340 < record.prompt_tokens < 460
        assert record.output_tokens == 16
        assert record.finish == "length"
        assert record.kv_cache is not None
        # The server may put several tokens into one event, but has no reason to for one request.
        assert len(record.gaps_ms) >= 12
        assert 0 < record.ttft < record.latency
    assert evicting.kv_cache["tokens_held"] < whole.kv_cache["tokens_held"]


def test_config_says_what_is_served(server: LiveServer) -> None:
    url = f"{server.url}/plugins/h2o/config"
    # vLLM's own check of --api-key does not reach this path.
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"authorization": "Bearer wrong"}).status_code == 401
    answer = httpx.get(url, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    assert KEY not in answer.text
    config = answer.json()
    assert config["models"] == [MODEL]
    assert config["defaults"]["kv_budget"] == 0.9
    assert config["defaults"]["kv_recent"] == 0.5
    assert config["limits"]["kv_budget_max"] == 0.9
    assert config["limits"]["kv_policies"] == list(policy_names(calibrated=False))
    assert config["limits"]["kv_ranks"] == list(joinable_ranks(calibrated=False))
    assert "/v1/responses" in config["routes"]["accepted"]
    assert "/v1/messages" in config["routes"]["accepted"]
    assert config["defaults"]["kv_protect"] == 0
    # Whoever bounds budgets bounds what escapes them.
    assert config["limits"]["kv_protect_max"] == 1024
    assert config["defaults"]["kv_elastic"] is False
    assert config["limits"]["kv_elastic_admission"] == "squeeze"
    assert {"kv_elastic", "kv_evict_from"} <= set(config["limits"]["request_fields"])
    cache = config["kv_cache"]
    assert cache["block_size"] == 32
    assert cache["num_tokens"] == 32 * (cache["num_blocks"] - ENGINES)
    assert config["support"]["state"] == "supported"
    assert config["support"]["device"] == "cpu"
    assert config["support"]["kv_full_kernel"] == "auto"
    assert config["support"]["data_parallel_size"] == ENGINES
    assert set(config["versions"]) == {"h2o_vllm", "vllm", "torch", "python"}
    assert httpx.post(url).status_code == 401
    assert httpx.post(url, headers={"authorization": f"Bearer {KEY}"}).status_code == 405


def test_config_is_in_the_openapi_page(server: LiveServer) -> None:
    page = httpx.get(f"{server.url}/openapi.json").json()
    route = page["paths"]["/plugins/h2o/config"]["get"]
    schema = route["responses"]["200"]["content"]["application/json"]["schema"]
    properties = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    assert {"defaults", "limits", "routes", "kv_cache", "versions", "support"} <= set(properties)
    assert "401" in route["responses"]
    assert "/v1/chat/completions" in page["paths"]
