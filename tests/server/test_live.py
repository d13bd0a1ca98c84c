# SPDX-License-Identifier: Apache-2.0
"""The real server with a tiny model and the real ``openai`` client. The last test stops it."""

from __future__ import annotations

import concurrent.futures
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from h2o_vllm.server.report import REPORT_KEYS
from loadtest.http.generator import Generator
from loadtest.http.options import LoadSettings
from tests.server.live_server import KEY, MODEL, LiveServer, live_server

pytestmark = pytest.mark.e2e

USAGE = "vllm:kv_cache_usage_perc"
LONG = [1000 + 7 * i for i in range(1500)]
"""A prompt of exactly 1500 tokens."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with live_server(log, *tiny, "--kv-recent", "0.4") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


def complete(client: openai.OpenAI, prompt: Any = "Hello", **options: Any) -> Any:
    fields = {k: options.pop(k) for k in list(options) if k.startswith(("kv_", "ignore", "use_"))}
    options = {"max_tokens": 8, "temperature": 0} | options
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=fields, **options)


def report_of(stream: Any) -> tuple[str, dict[str, Any], list[Any]]:
    """The text of a streamed completion, its report, and its chunks."""
    chunks = list(stream)
    with_report = [chunk for chunk in chunks if getattr(chunk, "kv_cache", None)]
    assert with_report == [chunks[-1]]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    return text, chunks[-1].kv_cache, chunks


def test_models_and_health(server: LiveServer, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_start_says_what_is_active(server: LiveServer) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "H2O: kv_budget" in line]
    assert len(lines) == 1
    for part in ("kv_budget=1.0", "kv_policy=attention", "kv_recent=0.4", "block size 32"):
        assert part in lines[0]


def test_a_fifth_of_the_cache_is_held(client: openai.OpenAI) -> None:
    answer = complete(client, LONG, max_tokens=200, ignore_eos=True, kv_budget=0.2)
    report = answer.kv_cache
    assert tuple(report) == REPORT_KEYS
    assert answer.usage.completion_tokens == 200
    assert report["tokens_seen"] == 1500 + 200 - 1
    assert report["budget"] == 0.2
    assert report["recent"] == 0.4
    assert report["policy"] == "attention"
    budget = 0.2 * report["tokens_seen"]
    assert budget <= report["tokens_held"] <= budget + report["block_size"]
    assert report["tokens_held"] + report["tokens_evicted"] == report["tokens_seen"]
    assert report["blocks_freed"] * report["block_size"] == report["tokens_evicted"]
    assert report["peak_blocks"] >= 1500 // report["block_size"]
    assert answer.kv_transfer_params is None


@pytest.mark.parametrize("fields", [{}, {"kv_budget": 1.0}, {"kv_policy": "window"}])
def test_full_budget_evicts_nothing(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    report = complete(client, LONG[:600], **fields).kv_cache
    assert report["tokens_held"] == report["tokens_seen"] == 607
    assert report["tokens_evicted"] == report["blocks_freed"] == 0


def test_every_field_has_an_effect(client: openai.OpenAI) -> None:
    fields = {"kv_budget_tokens": 200, "kv_recent": 0.9, "kv_policy": "snapkv", "kv_protect": 4}
    fields |= {"kv_heads": "shared"}
    top = complete(client, LONG[:600], **fields).kv_cache
    nested = complete(client, LONG[:600], kv_budget=None).kv_cache
    xargs = client.completions.create(
        model=MODEL,
        prompt=LONG[:600],
        max_tokens=8,
        temperature=0,
        extra_body={"vllm_xargs": fields},
    ).kv_cache  # type: ignore[attr-defined]
    # The second request reads the protected block of the first.
    assert top | {"tokens_cached": 32} == xargs
    # Protected tokens, in whole blocks, come on top.
    assert (top["budget_tokens"], top["recent"]) == (232, 0.9)
    assert (top["policy"], top["heads"], top["tokens_protected"]) == ("end", "shared", 32)
    assert 232 <= top["tokens_held"] <= 264
    assert nested["tokens_evicted"] == 0


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("fields", [{}, {"kv_budget": 0.3}])
def test_streamed_completion_equals_the_unstreamed(
    client: openai.OpenAI, usage: bool, fields: dict[str, Any]
) -> None:
    whole = complete(client, LONG[:600], **fields)
    options = {"include_usage": True} if usage else None
    stream = complete(client, LONG[:600], stream=True, stream_options=options, **fields)
    text, report, chunks = report_of(stream)
    assert text == whole.choices[0].text
    assert report["tokens_held"] == whole.kv_cache["tokens_held"]
    assert report["tokens_seen"] == 607
    assert len(chunks) >= 8
    assert (chunks[-1].usage is not None) == usage


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name three colours."}],
        max_tokens=12,
        stream=stream,
        extra_body={"kv_budget": 0.5},
    )
    report = list(answer)[-1].kv_cache if stream else answer.kv_cache
    assert report["budget"] == 0.5
    assert report["tokens_seen"] > 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", ["n", "prompts"])
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


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_with_a_report(client: openai.OpenAI, stream: bool) -> None:
    whole = complete(client, LONG[:400], max_tokens=24, kv_budget=0.5).choices[0].text
    stop = whole.strip()[4:7]
    answer = complete(client, LONG[:400], max_tokens=24, kv_budget=0.5, stop=stop, stream=stream)
    if stream:
        text, report, chunks = report_of(answer)
        reason = next(c.finish_reason for k in chunks for c in k.choices if c.finish_reason)
    else:
        text, report, reason = (
            answer.choices[0].text,
            answer.kv_cache,
            answer.choices[0].finish_reason,
        )
    assert reason == "stop"
    assert stop not in text
    assert 400 <= report["tokens_seen"] < 424
    assert report["budget"] == 0.5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_budget": 0}, "kv_budget"),
        ({"kv_budget": 1.5}, "kv_budget"),
        ({"kv_budget": "0.2"}, "kv_budget"),
        ({"kv_budget": True}, "kv_budget"),
        ({"kv_budget": [0.2]}, "kv_budget"),
        ({"kv_budget": 10**400}, "kv_budget"),
        ({"kv_budget_tokens": 0}, "kv_budget_tokens"),
        ({"kv_budget_tokens": 2**40}, "kv_budget_tokens"),
        ({"kv_recent": -1}, "kv_recent"),
        ({"kv_policy": "lru"}, "kv_policy"),
        ({"kv_heads": "layer"}, "kv_heads"),
        ({"kv_heads": "shared", "kv_policy": "window"}, "kv_heads"),
        ({"kv_sinks": 4}, "kv_sinks"),
        ({"kv_buget": 0.2}, "kv_buget"),
        ({"vllm_xargs": {"kv_budget": "0.2"}}, "kv_budget"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "kv_transfer_params"),
    ],
)
def test_bad_value_is_a_400_and_the_next_request_works(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="Hello", extra_body=fields)
    error: Any = caught.value.body
    assert error["param"] == param
    assert param in error["message"]
    assert complete(client, max_tokens=2).kv_cache["tokens_seen"] > 0


def test_requests_of_eight_budgets_finish_and_leave_the_pool_empty(
    server: LiveServer, client: openai.OpenAI
) -> None:
    budgets = [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0]

    def one(i: int) -> Any:
        budget = budgets[i % len(budgets)]
        prompt = LONG[i : i + 300]
        return complete(client, prompt, max_tokens=24, ignore_eos=True, kv_budget=budget)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(32)))
    for i, answer in enumerate(answers):
        report = answer.kv_cache
        assert report["budget"] == budgets[i % len(budgets)]
        assert report["tokens_seen"] == 323
        # The floor of 128 tokens rules over the smallest budgets.
        budget = max(128, report["budget"] * 323)
        assert min(323, int(budget)) <= report["tokens_held"] <= budget + report["block_size"]
    server.wait_for(USAGE, 0.0)
    server.wait_for("vllm:num_requests_running", 0.0)


def test_client_that_leaves_frees_its_blocks(server: LiveServer, client: openai.OpenAI) -> None:
    stream = complete(client, LONG[:400], max_tokens=1500, ignore_eos=True, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_for("vllm:num_requests_running", 0.0)
    server.wait_for(USAGE, 0.0)


def test_batch_of_chats(server: LiveServer) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("One?", "Two, please?")]
    body = {"model": MODEL, "messages": chats, "max_tokens": 4, "kv_budget": 0.5}
    report = server.post("/v1/chat/completions/batch", body).json()["kv_cache"]
    assert [sequence["budget"] for sequence in report["sequences"]] == [0.5, 0.5]


def test_responses_api(client: openai.OpenAI) -> None:
    options: Any = {
        "model": MODEL,
        "input": "Hello",
        "max_output_tokens": 4,
        "extra_body": {"kv_budget": 0.5},
    }
    assert client.responses.create(**options).kv_cache["budget"] == 0.5
    *_, last = client.responses.create(stream=True, **options)
    assert last.response.kv_cache["budget"] == 0.5


def test_invocations(server: LiveServer) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "kv_budget": 0.5}
    assert server.post("/invocations", body).json()["kv_cache"]["budget"] == 0.5
    assert server.post("/invocations", body | {"kv_budget": 9}).status_code == 400


def test_beam_search_takes_no_budget(client: openai.OpenAI) -> None:
    answer = complete(client, n=2, max_tokens=3, use_beam_search=True)
    assert not hasattr(answer, "kv_cache")
    with pytest.raises(openai.BadRequestError, match="use_beam_search"):
        complete(client, n=2, use_beam_search=True, kv_budget=0.5)


def test_route_that_cannot_honour_a_budget_refuses_it(server: LiveServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    refused = server.post("/generative_scoring", body | {"kv_budget": 0.5})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_budget"


def test_wrong_key_is_a_401_whatever_the_body(server: LiveServer) -> None:
    body = {"model": MODEL, "prompt": "Hello", "kv_budget": 9}
    assert server.post("/v1/completions", body, key="wrong").status_code == 401


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"prompt": 1', b"[" * 100_000])
def test_broken_body_gets_vllms_own_answer(server: LiveServer, content: bytes) -> None:
    headers = {"authorization": "Bearer live-test-key", "content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert "kv_" not in answer.text


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


def test_sigterm_ends_the_server_without_a_trace(server: LiveServer) -> None:
    before = len(server.log.read_text())
    assert len(server.members()) >= 2
    assert server.stop(signal.SIGTERM) == 0
    assert server.members_after(seconds=60) == []
    said = server.log.read_text()[before:]
    assert "Traceback" not in said
    assert "leaked" not in said
