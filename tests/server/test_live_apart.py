# SPDX-License-Identifier: Apache-2.0
"""A prefill server and a decode server over a shared folder, and what is lost if one of them is killed."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from loadtest.common.servers import Server, free_port
from tests.server.live_server import KEY, LiveServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROUTER = (sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation")
HEADERS = {"authorization": f"Bearer {KEY}"}

TEXT = "The server computes a prompt once, and another server goes on from there. " * 40


def side(folder: Path, role: str, *options: str) -> LiveServer:
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
    }
    asked = ["--kv-transfer-config", json.dumps(transfer)]
    return LiveServer(folder / role, *options, *asked)


def body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


class Pair(NamedTuple):
    """The two servers, and the folder between them."""

    prefill: LiveServer
    decode: LiveServer
    folder: Path


@pytest.fixture(scope="module")
def pair(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    prefill, decode = (side(folder, role, *tiny) for role in ("kv_producer", "kv_consumer"))
    try:
        prefill.wait_until_up()
        decode.wait_until_up()
        yield Pair(prefill, decode, folder)
    finally:
        prefill.kill()
        decode.kill()


@contextmanager
def routed(pair: Pair) -> Iterator[str]:
    """The address of vLLM's router before both."""
    options = ["--prefill", pair.prefill.url, "--decode", pair.decode.url, "--host", "127.0.0.1"]
    options += ["--prometheus-port", str(free_port())]
    # It sends its own key, not a client's.
    key = {"OPENAI_API_KEY": KEY}
    log = pair.folder / "router.log"
    with Server(ROUTER, options, log, name="vllm-router", environment=key) as router:
        yield router.url


def test_vllms_router_asks_one_side_after_the_other(pair: Pair) -> None:
    """Budget fields, reports and 400s pass unchanged, streams included. Clients need no key."""
    pytest.importorskip("vllm_router", reason="vLLM's router is in the extra fleet")
    fields: dict[str, Any] = {"kv_budget": 0.3, "kv_policy": "h2o", "kv_delay": 0}
    with routed(pair) as url, httpx.Client(base_url=url, timeout=120) as client:
        answer = client.post("/v1/completions", json=body(TEXT, 40, **fields)).json()
        report = answer["kv_cache"]
        assert report["budget"] == 0.3
        assert report["tokens_cached"] == answer["usage"]["prompt_tokens"] - 1
        assert len([*(pair.folder / "kv").glob("*.kept")]) == 1
        chat = {
            "messages": [{"role": "user", "content": "Again: " + TEXT}],
            "max_completion_tokens": 30,
        }
        chat |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        lines = client.post("/v1/chat/completions", json={**chat, **fields}).text.splitlines()
        said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "data: [DONE]" in lines
        (report,) = [one["kv_cache"] for one in said if one.get("kv_cache")]
        (usage,) = [one["usage"] for one in said if one.get("usage")]
        assert report["tokens_cached"] == usage["prompt_tokens"] - 1
        assert usage["completion_tokens"] == 30
        assert pair.decode.metric("vllm:generation_tokens_total") == 70
        assert pair.prefill.metric("vllm:generation_tokens_total") == 2
        refused = client.post("/v1/completions", json=body(TEXT, 9, kv_budget=7))
        assert refused.status_code == 400 and "kv_budget" in refused.text


def test_a_pair_serves_and_a_killed_side_takes_only_its_own_streams(pair: Pair) -> None:
    """As vLLM's router asks: first for one token, then for the answer."""
    prefill, decode, _ = pair
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    text = "Whole. " + TEXT
    computed = prefill.post("/v1/completions", body(text, 1, kv_transfer_params=remote)).json()
    assert computed["kv_cache"]["budget"] == 1.0
    fields: dict[str, Any] = {"kv_budget": 0.3, "kv_policy": "window"}
    fields["kv_transfer_params"] = {"do_remote_decode": False, "do_remote_prefill": True}
    answer = decode.post("/v1/completions", body(text, 60, **fields)).json()
    size = answer["kv_cache"]["block_size"]
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert answer["kv_cache"]["tokens_cached"] == (prompt_tokens - 1) // size * size
    assert answer["kv_cache"]["tokens_evicted"] > 0
    fields = {"kv_budget": 0.3, "kv_policy": "h2o", "kv_delay": 0, "return_token_ids": True}
    again = "Only what stays travels. " + TEXT
    computed = prefill.post("/v1/completions", body(again, 1, **fields)).json()
    assert computed["kv_cache"]["budget"] == 0.3
    answer = decode.post("/v1/completions", body(again, 60, **fields)).json()
    assert answer["kv_cache"]["tokens_cached"] == answer["usage"]["prompt_tokens"] - 1
    first = computed["choices"][0]["token_ids"]
    assert answer["choices"][0]["token_ids"][:1] == first
    asked = body(TEXT, 9, kv_budget=0.3, kv_policy="h2o", kv_delay=1)
    refused = decode.post("/v1/completions", asked)
    assert refused.status_code == 400
    assert "receives the KV of prompts and no attention" in refused.text

    budget = {"kv_budget": 0.3, "kv_policy": "window"}
    with httpx.stream(
        "POST",
        f"{decode.url}/v1/completions",
        json=body(text, 400, stream=True, **budget),
        headers=HEADERS,
        timeout=120,
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        prefill.kill()
        assert "data: [DONE]" in list(lines)
    alone = decode.post("/v1/completions", body("Nobody has " + TEXT, 60, **budget)).json()
    assert alone["kv_cache"]["tokens_cached"] == 0
    assert alone["usage"]["completion_tokens"] == 60
    decode.wait_for("vllm:kv_cache_usage_perc", 0)


class Clients(threading.Thread):
    """Clients that ask as vLLM's router does, one request after the other, until they are told to stop.

    A prefill server that does not answer is passed over. How each request ended is noted.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.stopping = number, threading.Event()
        self.prefill: LiveServer | None = None
        self.decode: LiveServer | None = None
        self.ended: list[tuple[float, str, dict[str, Any]]] = []

    def run(self) -> None:
        count = 0
        while not self.stopping.is_set():
            count += 1
            began, report = time.monotonic(), {}
            # Half of the prompts come again.
            asked = body(f"{self.number} {count // 2} " + TEXT, 60, kv_budget=0.3, kv_policy="key")
            try:
                self._prefilled(asked)
                how, report = self._answered(asked)
            except httpx.HTTPError:
                how = "refused"
                time.sleep(0.2)
            self.ended.append((began, how, report))

    def _prefilled(self, asked: dict[str, Any]) -> None:
        assert self.prefill is not None
        try:
            assert self.prefill.post("/v1/completions", {**asked, "max_tokens": 1}).is_success
        except httpx.HTTPError:
            return

    def _answered(self, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        assert self.decode is not None
        url, lines = f"{self.decode.url}/v1/completions", []
        with httpx.stream(
            "POST", url, json={**asked, "stream": True}, headers=HEADERS, timeout=120
        ) as stream:
            stream.raise_for_status()
            try:
                lines.extend(line for line in stream.iter_lines() if line)
            except httpx.HTTPError:
                return "broken", {}
        reports = [json.loads(line[6:]).get("kv_cache") for line in lines if line[6:7] == "{"]
        whole = "data: [DONE]" in lines
        return "whole" if whole else "broken", next(filter(None, reports), {})


@pytest.mark.long
def test_either_side_is_killed_under_load_and_comes_back(tiny: list[str], tmp_path: Path) -> None:
    """Without the first the second computes; without the second its open streams break. No block leaks."""
    prefill, decode = side(tmp_path, "kv_producer", *tiny), side(tmp_path, "kv_consumer", *tiny)
    clients = [Clients(number) for number in range(4)]

    def to(**servers: LiveServer) -> None:
        for client in clients:
            vars(client).update(servers)

    def answered(more: int) -> None:
        until = len(ended()) + more
        deadline = time.monotonic() + 300
        while len(ended()) < until:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def ended() -> list[tuple[float, str, dict[str, Any]]]:
        return [one for client in clients for one in client.ended]

    try:
        prefill.wait_until_up()
        decode.wait_until_up()
        to(prefill=prefill, decode=decode)
        for client in clients:
            client.start()
        answered(8)
        prefill.kill()
        answered(12)
        prefill = side(tmp_path, "kv_producer", *tiny)
        prefill.wait_until_up()
        to(prefill=prefill)
        answered(12)
        assert {how for _, how, _ in ended()} == {"whole"}, "a decode server needs no other"
        killed = time.monotonic()
        decode.kill()
        time.sleep(2)
        decode = side(tmp_path, "kv_consumer", *tiny)
        decode.wait_until_up()
        to(decode=decode)
        back = time.monotonic()
        answered(16)
        for client in clients:
            client.stopping.set()
        for client in clients:
            client.join(120)
        outcomes = ended()
        assert Counter(how for _, how, _ in outcomes)["broken"] <= len(clients)
        lost = [how for at, how, _ in outcomes if at < killed and how != "whole"]
        assert len(lost) <= len(clients), "more than was open"
        later = [(how, report) for at, how, report in outcomes if at > back]
        assert later and {how for how, _ in later} == {"whole"}
        assert any(report["tokens_cached"] for _, report in later), (
            "it loads what was stored before"
        )
        for server in (prefill, decode):
            server.wait_for("vllm:kv_cache_usage_perc", 0)
            server.wait_for("vllm:num_requests_running", 0)
    finally:
        for client in clients:
            client.stopping.set()
        prefill.kill()
        decode.kill()
