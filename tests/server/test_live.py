# SPDX-License-Identifier: Apache-2.0
"""The life of one real server, with a tiny model: the real ``openai`` client, then clients who mean no good.

Its reports; who reaches it; clients that vanish, and nonsense. The last test stops it.
"""

from __future__ import annotations

import concurrent.futures
import random
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from h2o_vllm.server.access import OPEN
from h2o_vllm.server.report import REPORT_KEYS
from tests.server.grammar import Nonsense, nonsense
from tests.server.live_server import KEY, MODEL, LiveServer, live_server
from tests.server.streams import SilentClient, half_closed, send, under_load

pytestmark = pytest.mark.e2e

USAGE = "vllm:kv_cache_usage_perc"
LONG = [1000 + 7 * i for i in range(1500)]
"""A prompt of exactly 1500 tokens."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--kv-recent", "0.4", "--kv-budget-min", "0.05", "--shutdown-timeout", "60"]
    with live_server(log, *tiny, *options) as server:
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


def test_start_says_what_is_active(server: LiveServer) -> None:
    lines = [line for line in server.log.read_text().splitlines() if "H2O: kv_budget" in line]
    assert len(lines) == 1
    for part in ("kv_budget=1.0", "kv_policy=attention", "kv_recent=0.4", "block size 32"):
        assert part in lines[0]


def test_a_start_prints_a_page_at_most(server: LiveServer) -> None:
    """vLLM's own 110 lines had the page's address somewhere in between."""
    until_up, said, _ = server.log.read_text().partition("h2o-serve: stop:")
    assert said and 5 < len(until_up.splitlines()) <= 30


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


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client: openai.OpenAI, stream: bool) -> None:
    chat: list[Any] = [{"role": "user", "content": "Name three colours."}]
    fields = {"kv_budget": 0.5}
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=chat, max_tokens=12, stream=stream, extra_body=fields
    )
    report = list(answer)[-1].kv_cache if stream else answer.kv_cache
    assert report["budget"] == 0.5
    assert report["tokens_seen"] > 12


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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_budget": 1.5}, "kv_budget"),
        ({"kv_heads": "shared", "kv_policy": "window"}, "kv_heads"),
        ({"kv_buget": 0.2}, "kv_buget"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "kv_transfer_params"),
    ],
)
def test_bad_value_is_a_400_and_the_next_request_works(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="Hello", extra_body=fields)
    error: Any = caught.value.body
    assert error["param"] == param and param in error["message"]
    assert complete(client, max_tokens=2).kv_cache["tokens_seen"] > 0


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
    server.wait_for(USAGE, 0.0)
    server.wait_for("vllm:num_requests_running", 0.0)


def test_other_routes_take_budgets(server: LiveServer, client: openai.OpenAI) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("One?", "Two, please?")]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "kv_budget": 0.5}
    batch = server.post("/v1/chat/completions/batch", body | {"messages": chats}).json()
    assert [sequence["budget"] for sequence in batch["kv_cache"]["sequences"]] == [0.5, 0.5]
    body |= {"prompt": "Hello"}
    assert server.post("/invocations", body).json()["kv_cache"]["budget"] == 0.5
    assert server.post("/invocations", body | {"kv_budget": 9}).status_code == 400
    options: Any = {"model": MODEL, "input": "Hello", "extra_body": {"kv_budget": 0.5}}
    options["max_output_tokens"] = 4
    assert client.responses.create(**options).kv_cache["budget"] == 0.5
    *_, last = client.responses.create(stream=True, **options)
    assert last.response.kv_cache["budget"] == 0.5


def test_beam_search_takes_no_budget(client: openai.OpenAI) -> None:
    answer = complete(client, n=2, max_tokens=3, use_beam_search=True)
    assert not hasattr(answer, "kv_cache")
    with pytest.raises(openai.BadRequestError, match="use_beam_search"):
        complete(client, n=2, use_beam_search=True, kv_budget=0.5)


# Clients who mean no good


def is_idle_again(server: LiveServer) -> None:
    server.wait_for("vllm:num_requests_running", 0, 300)
    server.wait_for("vllm:num_requests_waiting", 0.0)
    server.wait_for("vllm:kv_cache_usage_perc", 0.0)


@pytest.mark.slow
def test_every_route_asks_for_the_key_but_those_of_health(server: LiveServer) -> None:
    page = httpx.get(f"{server.url}/openapi.json").json()
    routes = {(m.upper(), path) for path, methods in page["paths"].items() for m in methods}
    routes |= {("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/invocations")}
    assert len(routes) > 20
    asked = 0
    for method, path in sorted(routes):
        for key in (None, "wrong"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            url = server.url + path.replace("{", "").replace("}", "")
            answer = httpx.request(method, url, headers=headers, timeout=60)
            if path in OPEN:
                assert answer.status_code == 200, (method, path)
            else:
                assert answer.status_code == 401, (method, path)
                assert KEY not in answer.text
                asked += 1
    assert asked > 30


@pytest.mark.slow
def test_nobody_else_on_the_network_reaches_it(server: LiveServer) -> None:
    main = psutil.Process(server.process.pid)
    listening = [
        connection.laddr
        for process in (main, *main.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert server.port in {address.port for address in listening}
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_client_that_reads_nothing_holds_no_blocks(server: LiveServer) -> None:
    options: dict[str, Any] = {"max_tokens": 500, "logprobs": 5}
    with (
        SilentClient(server, kv_budget=0.3, **options),
        SilentClient(server, stream=False, **options),
    ):
        server.wait_for("vllm:num_requests_running", 2.0)
        is_idle_again(server)


@pytest.mark.slow
def test_clients_that_vanish_free_their_blocks(server: LiveServer) -> None:
    clients = [
        SilentClient(server, stream=i % 2 == 0, kv_budget=0.5 if i % 3 else 1.0) for i in range(12)
    ]
    server.wait_for("vllm:num_requests_running", 12.0)
    finished = server.metric("vllm:request_success_total", finished_reason="length")
    for client in clients:
        client.vanish()
    is_idle_again(server)
    # Aborted: the engine does not compute the rest.
    length = server.metric("vllm:request_success_total", finished_reason="length")
    assert length == finished


@pytest.mark.slow
def test_a_real_server_survives_nonsense_and_holds_nothing_of_it(
    server: LiveServer, long: bool, seed: int
) -> None:
    count = 10_000 if long else 1_000
    chance = random.Random(seed)
    statuses: Counter[int] = Counter()

    def one(request: Nonsense) -> None:
        status, body = send(server, request)
        statuses[status] += 1
        assert status < 500, (request, body[:300])

    def batch(size: int) -> None:
        requests = [nonsense(chance, MODEL) for _ in range(size)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(one, requests))
        for request in requests[: size // 10]:
            half_closed(server, request, chance)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            server.wait_for(f"vllm:{gauge}", 0.0)

    batch(count // 2)
    resident, files = server.weight()
    batch(count // 2)
    after, files_after = server.weight()
    print(f"{count} requests to a real server: {dict(statuses)}; {after - resident} bytes more")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert files_after <= files + 2
    assert after - resident < 96 << 20
    good = {"model": MODEL, "prompt": [5] * 300, "max_tokens": 4, "kv_budget": 0.5}
    assert server.post("/v1/completions", good).json()["kv_cache"]["tokens_evicted"] > 0


def test_sigterm_lets_running_requests_end_and_leaves_no_trace(server: LiveServer) -> None:
    before = len(server.log.read_text())
    assert len(server.members()) >= 2
    streams = under_load(server, max_tokens=200)
    with SilentClient(server, kv_budget=0.5, max_tokens=200):
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.join(300)
            assert not stream.failed
            assert stream.report["tokens_seen"] == 200 + 200 - 1
        # The silent client does not keep it.
        assert server.process.wait(timeout=300) == 0
    assert server.members_after(seconds=60) == []
    said = server.log.read_text()[before:]
    assert "Traceback" not in said
    assert "leaked" not in said
