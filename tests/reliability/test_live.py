# SPDX-License-Identifier: Apache-2.0
"""The life of one real server among clients who mean no good, or nothing at all. The last test ends it.

Its key is asked for, nobody else on the network reaches it, clients that do not read or that vanish hold no
blocks, nonsense leaves no trace, and SIGTERM lets run what is running. ``--long``: more nonsense.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from h2o_vllm.server.access import OPEN
from tests.reliability.grammar import Nonsense, nonsense
from tests.reliability.streams import SilentClient, under_load
from tests.server.live_server import KEY, MODEL, LiveServer, live_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with live_server(log, *tiny, "--kv-budget-min", "0.05", "--shutdown-timeout", "60") as server:
        yield server


def is_idle_again(server: LiveServer) -> None:
    server.wait_for("vllm:num_requests_running", 0.0, seconds=300)
    server.wait_for("vllm:num_requests_waiting", 0.0)
    server.wait_for("vllm:kv_cache_usage_perc", 0.0)


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
        is_idle_again(server)


def test_clients_that_vanish_free_their_blocks(server: LiveServer) -> None:
    clients = [
        SilentClient(server, stream=i % 2 == 0, kv_budget=0.5 if i % 3 else 1.0) for i in range(12)
    ]
    server.wait_for("vllm:num_requests_running", 12.0)
    finished = server.metric("vllm:request_success_total", finished_reason="length")
    for client in clients:
        client.vanish()
    is_idle_again(server)
    # Aborted, not computed to the end for nobody.
    length = server.metric("vllm:request_success_total", finished_reason="length")
    assert length == finished


def send_live(server: LiveServer, request: Nonsense) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": request.content_type}
    try:
        connection.request(request.method, request.path, request.content, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def half_closed(server: LiveServer, request: Nonsense, chance: random.Random) -> None:
    """Send a part of the request, close one direction or both, and wait for no answer in particular."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(request.content) + 1}\r\n\r\n"
    ).encode()
    whole = head + request.content
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, timeout=20) as connection, contextlib.suppress(OSError):
        connection.sendall(whole[: chance.randrange(1, len(whole) + 1)])
        connection.shutdown(chance.choice((socket.SHUT_WR, socket.SHUT_RDWR)))
        connection.recv(1000)


def weight(server: LiveServer) -> tuple[int, int]:
    """Resident bytes and open files of the server's processes together."""
    main = psutil.Process(server.process.pid)
    every = [main, *main.children(recursive=True)]
    return sum(p.memory_info().rss for p in every), sum(p.num_fds() for p in every)


def test_a_real_server_survives_nonsense_and_holds_nothing_of_it(
    server: LiveServer, long: bool, seed: int
) -> None:
    count = 10_000 if long else 1_000
    chance = random.Random(seed)
    statuses: Counter[int] = Counter()

    def one(request: Nonsense) -> None:
        status, body = send_live(server, request)
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
    resident, files = weight(server)
    batch(count // 2)
    after, files_after = weight(server)
    print(f"{count} requests to a real server: {dict(statuses)}; {after - resident} bytes more")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert files_after <= files + 2
    assert after - resident < 96 << 20
    good = {"model": MODEL, "prompt": [5] * 300, "max_tokens": 4, "kv_budget": 0.5}
    assert server.post("/v1/completions", good).json()["kv_cache"]["tokens_evicted"] > 0


def test_sigterm_lets_running_requests_end(server: LiveServer) -> None:
    streams = under_load(server, max_tokens=500)
    with SilentClient(server, kv_budget=0.5, max_tokens=500):
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.join(300)
            assert not stream.failed
            assert stream.report["tokens_seen"] == 200 + 500 - 1
        # The silent client does not keep it.
        assert server.process.wait(timeout=300) == 0
    assert server.members_after(seconds=60) == []
