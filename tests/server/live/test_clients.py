# SPDX-License-Identifier: Apache-2.0
"""Clients who mean no good: without a key, silent, gone, or sending nonsense."""

import concurrent.futures
import random
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from h2o_vllm.server.access import OPEN
from tests.server.grammar import Nonsense, nonsense
from tests.server.live_server import KEY, MODEL, LiveServer
from tests.server.streams import SilentClient, half_closed, send

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


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


def test_client_that_reads_nothing_holds_no_blocks(server: LiveServer) -> None:
    options: dict[str, Any] = {"max_tokens": 500, "logprobs": 5}
    with (
        SilentClient(server, kv_budget=0.3, **options),
        SilentClient(server, stream=False, **options),
    ):
        server.wait_for("vllm:num_requests_running", 2.0)
        server.is_idle()


def test_clients_that_vanish_free_their_blocks(server: LiveServer) -> None:
    clients = [
        SilentClient(server, stream=i % 2 == 0, kv_budget=0.5 if i % 3 else 1.0) for i in range(12)
    ]
    server.wait_for("vllm:num_requests_running", 12.0)
    finished = server.metric("vllm:request_success_total", finished_reason="length")
    for client in clients:
        client.vanish()
    server.is_idle()
    # Aborted: the engine does not compute the rest.
    length = server.metric("vllm:request_success_total", finished_reason="length")
    assert length == finished


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
        server.is_idle()

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
