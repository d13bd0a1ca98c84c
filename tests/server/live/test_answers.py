# SPDX-License-Identifier: Apache-2.0
"""Answers, reports and metrics of a real server, by the real ``openai`` client where it has the route."""

import concurrent.futures
import json
from typing import Any

import httpx
import openai
import pytest

from h2o_vllm.policy.policy import joinable_ranks, policy_names
from loadtest.http.generator import Generator
from loadtest.http.options import LoadSettings
from tests.metrics.exposed import exposed_names
from tests.server.conftest import engine_report
from tests.server.live_server import KEY, MODEL, LiveServer

pytestmark = pytest.mark.e2e

LONG = [1000 + 7 * i for i in range(1500)]
"""A prompt of exactly 1500 tokens."""
CHAT = [{"role": "user", "content": "Name three colours."}]


def complete(client: openai.OpenAI, prompt: Any = "Hello", **options: Any) -> Any:
    fields = {k: options.pop(k) for k in list(options) if k.startswith(("kv_", "ignore", "use_"))}
    options = {"max_tokens": 8, "temperature": 0} | options
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=fields, **options)


def report_of(stream: Any) -> tuple[str, dict[str, Any], list[Any]]:
    """The text of a streamed completion, its report, and its chunks."""
    chunks = list(stream)
    assert [chunk for chunk in chunks if getattr(chunk, "kv_cache", None)] == [chunks[-1]]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    return text, chunks[-1].kv_cache, chunks


def test_a_start_prints_a_page_at_most_which_says_what_is_active(server: LiveServer) -> None:
    until_up, said, _ = server.log().partition("h2o-serve: stop:")
    assert said and 5 < len(until_up.splitlines()) <= 30
    (line,) = [line for line in until_up.splitlines() if "H2O: kv_budget" in line]
    for part in ("kv_budget=1.0", "kv_policy=attention", "kv_protect=system", "block size 32"):
        assert part in line


def test_a_fifth_of_the_cache_is_held(client: openai.OpenAI) -> None:
    answer = complete(client, LONG, max_tokens=200, ignore_eos=True, kv_budget=0.2)
    report = answer.kv_cache
    assert tuple(report) == tuple(engine_report())
    assert answer.usage.completion_tokens == 200
    assert report["tokens_seen"] == 1500 + 200 - 1
    assert (report["budget"], report["recent"], report["policy"]) == (0.2, 0.5, "attention")
    budget = 0.2 * report["tokens_seen"]
    assert budget <= report["tokens_held"] <= budget + report["block_size"]
    assert report["tokens_held"] + report["tokens_evicted"] == report["tokens_seen"]
    assert report["blocks_freed"] * report["block_size"] == report["tokens_evicted"]
    assert report["peak_blocks"] >= 1500 // report["block_size"]
    assert answer.kv_transfer_params is None


def test_every_field_has_an_effect(client: openai.OpenAI) -> None:
    fields = {"kv_budget_tokens": 200, "kv_recent": 0.9, "kv_policy": "snapkv", "kv_protect": 4}
    fields |= {"kv_heads": "shared"}
    top = complete(client, LONG[:600], **fields).kv_cache
    nothing = complete(client, LONG[:600], kv_budget=None).kv_cache
    xargs: Any = client.completions.create(
        model=MODEL, prompt=LONG[:600], max_tokens=8, temperature=0, extra_body={"vllm_xargs": fields}
    )  # fmt: skip
    # The second request reads the protected block of the first.
    assert top | {"tokens_cached": 32} == xargs.kv_cache
    # Protected tokens, in whole blocks, come on top.
    assert (top["budget_tokens"], top["recent"]) == (232, 0.9)
    assert (top["policy"], top["heads"], top["tokens_protected"]) == ("end", "shared", 32)
    assert 232 <= top["tokens_held"] <= 264
    assert nothing["tokens_evicted"] == 0


@pytest.mark.parametrize(("usage", "fields"), [(True, {"kv_budget": 0.3}), (False, {})])
def test_streamed_completion_equals_the_unstreamed(
    client: openai.OpenAI, usage: bool, fields: dict[str, Any]
) -> None:
    fields = fields | {"max_tokens": 64}
    whole = complete(client, LONG[:600], **fields)
    options = {"include_usage": True} if usage else None
    stream = complete(client, LONG[:600], stream=True, stream_options=options, **fields)
    text, report, chunks = report_of(stream)
    assert text == whole.choices[0].text
    assert report["tokens_held"] == whole.kv_cache["tokens_held"]
    assert report["tokens_seen"] == 600 + whole.usage.completion_tokens - 1
    # A busy server joins tokens that wait to be sent: their number is not the chunks'.
    assert sum(any(choice.text for choice in chunk.choices) for chunk in chunks) >= 2
    assert (chunks[-1].usage is not None) == usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_with_a_report(client: openai.OpenAI, stream: bool) -> None:
    fields = {"max_tokens": 24, "kv_budget": 0.5}
    stop = complete(client, LONG[:400], **fields).choices[0].text.strip()[4:7]
    answer = complete(client, LONG[:400], stop=stop, stream=stream, **fields)
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert {choice.finish_reason for choice in choices} - {None} == {"stop"}
    assert stop not in "".join(choice.text for choice in choices)
    report = chunks[-1].kv_cache
    assert report["budget"] == 0.5 and 400 <= report["tokens_seen"] < 423


@pytest.mark.parametrize(("case", "stream"), [("n", True), ("prompts", False)])
def test_several_sequences_are_reported_one_by_one(
    client: openai.OpenAI, case: str, stream: bool
) -> None:
    options = {"n": 2, "temperature": 1.0, "seed": 1} if case == "n" else {}
    prompt = LONG[:400] if case == "n" else [LONG[:300], LONG[:500]]
    answer = complete(client, prompt, kv_budget=0.5, stream=stream, ignore_eos=True, **options)
    report = report_of(answer)[1] if stream else answer.kv_cache
    seen = [sequence["tokens_seen"] for sequence in report["sequences"]]
    assert seen == ([407, 407] if case == "n" else [307, 507])
    for key in ("tokens_seen", "tokens_held", "tokens_evicted", "blocks_freed"):
        assert report[key] == sum(sequence[key] for sequence in report["sequences"])


def test_requests_of_eight_budgets_finish_and_leave_the_pool_empty(
    server: LiveServer, client: openai.OpenAI
) -> None:
    budgets = [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0]

    def one(i: int) -> Any:
        budget = budgets[i % len(budgets)]
        return complete(client, LONG[i:][:300], max_tokens=24, ignore_eos=True, kv_budget=budget)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(32)))
    for i, answer in enumerate(answers):
        report = answer.kv_cache
        assert report["budget"] == budgets[i % len(budgets)]
        assert report["tokens_seen"] == 323
        # The floor of 128 tokens rules over the smallest budgets.
        budget = max(128, report["budget"] * 323)
        assert min(323, int(budget)) <= report["tokens_held"] <= budget + report["block_size"]
    server.is_idle()


@pytest.mark.parametrize(
    ("path", "body", "stream"),
    [
        ("/v1/chat/completions", {"messages": CHAT}, False),
        ("/v1/chat/completions", {"messages": CHAT}, True),
        ("/v1/chat/completions/batch", {"messages": [CHAT, CHAT]}, False),
        ("/invocations", {"prompt": "Hello"}, False),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}, False),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}, True),
        ("/v1/messages", {"system": "Be brief.", "messages": CHAT}, False),
        ("/v1/messages", {"system": "Be brief.", "messages": CHAT}, True),
    ],
)
def test_other_routes_take_budgets_and_report(
    server: LiveServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = {"model": MODEL, "max_tokens": 4, "kv_budget": 0.5, "stream": stream, **body}
    answer = server.post(path, body)
    assert answer.status_code == 200 and "h2o_" not in answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines] if stream else [answer.json()]
    reports = [
        event.get("kv_cache") or event.get("response", {}).get("kv_cache") for event in events
    ]
    (report,) = filter(None, reports)
    for one in report.get("sequences", [report]):
        assert one["budget"] == 0.5 and one["tokens_seen"] > 3
    refused = server.post(path, body | {"kv_budget": 9})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_budget")
    assert (refused.json().get("type") == "error") == (path == "/v1/messages")


def test_beam_search_takes_no_budget(client: openai.OpenAI) -> None:
    answer = complete(client, n=2, max_tokens=3, use_beam_search=True)
    assert not hasattr(answer, "kv_cache")
    with pytest.raises(openai.BadRequestError, match="use_beam_search"):
        complete(client, n=2, use_beam_search=True, kv_budget=0.5)


# What an operator sees


@pytest.mark.slow
def test_metrics_follow_what_is_evicted(server: LiveServer, client: openai.OpenAI) -> None:
    server.is_idle()
    names = ("evicted_tokens_total", "freed_blocks_total", "eviction_seconds_count")
    tokens, blocks, timed = server.metrics(*(f"h2o:{name}" for name in names))
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
    server.wait_for("h2o:kv_tokens_full", 0)
    server.wait_for("h2o:kv_tokens_held", 0)


@pytest.mark.slow
def test_a_scraper_that_prefers_openmetrics_finds_the_same_names(server: LiveServer) -> None:
    # prometheus_client's own OpenMetrics writer would turn the colons into underscores.
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4"}
    text = httpx.get(f"{server.url}/metrics", headers=accept).text
    for name in exposed_names() | {"vllm:num_requests_running"}:
        assert f"\n{name}{{" in text, name


@pytest.mark.slow
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


@pytest.mark.slow
def test_load_generator_reads_what_the_server_sends(server: LiveServer) -> None:
    settings = LoadSettings(api_key=KEY, budgets="0.2,none", prompt_tokens=400, output_tokens=16)
    generator = Generator(settings, server.url)
    generator.prepare()
    evicting, whole = (generator.send(number, generator.now()) for number in range(2))
    for record in (evicting, whole):
        assert record.error is None and record.finish == "length"
        assert 340 < record.prompt_tokens < 460 and record.output_tokens == 16
        assert 0 < record.ttft < record.latency
    assert evicting.kv_cache["tokens_held"] < whole.kv_cache["tokens_held"]


@pytest.mark.slow
def test_config_says_what_is_served_to_whoever_has_the_key(server: LiveServer) -> None:
    url, headers = f"{server.url}/plugins/h2o/config", {"authorization": f"Bearer {KEY}"}
    # vLLM's own check of --api-key does not reach this path.
    for wrong in ({}, {"authorization": "Bearer wrong"}):
        assert httpx.get(url, headers=wrong).status_code == 401
    answer = httpx.get(url, headers=headers)
    assert answer.status_code == 200 and KEY not in answer.text
    config = answer.json()
    assert config["models"] == [MODEL]
    said = {"kv_budget": 1.0, "kv_recent": 0.5, "kv_protect": "system", "kv_elastic": False}
    assert said.items() <= config["defaults"].items()
    assert config["limits"]["kv_policies"] == list(policy_names(calibrated=False))
    assert config["limits"]["kv_ranks"] == list(joinable_ranks(calibrated=False))
    assert {"/v1/responses", "/v1/messages"} <= set(config["routes"]["accepted"])
    cache = config["kv_cache"]
    assert cache["block_size"] == 32 and cache["num_tokens"] == 32 * (cache["num_blocks"] - 1)
    support = {"device": "cpu", "kv_full_kernel": "auto"}
    assert support.items() <= config["support"].items()
    assert set(config["versions"]) == {"h2o_vllm", "vllm", "torch", "python"}
    page = httpx.get(f"{server.url}/openapi.json").json()
    route = page["paths"]["/plugins/h2o/config"]["get"]
    schema = route["responses"]["200"]["content"]["application/json"]["schema"]
    described = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    assert set(config) == set(described) and "401" in route["responses"]
