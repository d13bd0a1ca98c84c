# SPDX-License-Identifier: Apache-2.0
"""The load generator measures what a server was set to. Threads stand in for Locust's greenlets.

Times are exact where the clock is the test's; what needs a connection has a mock server in its own process.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loadtest.common.client import HTTPStatusError
from loadtest.http.generator import Generator
from loadtest.http.options import LoadSettings
from loadtest.http.records import ALL, Summary, summarise
from tests.loadtest.conftest import BROKEN, FAST, TIMED, StartMock

SETTINGS = LoadSettings(prompt_tokens=400, output_tokens=25, warmup=0)
TTFT, ITL = 0.150, 0.020


class Scripted:
    """In the place of a ``Client``: each answer's tokens come at their times, in no time."""

    now = 0.0

    def get_json(self, path: str) -> Any:
        return {"data": [{"id": "scripted"}], "version": "0"}

    def post_json(self, path: str, body: dict[str, Any]) -> Any:
        return {"count": len(body["prompt"]) // 4}

    def stream(self, path: str, body: Any, on_chunk: Callable[[bytes], None], **_: Any) -> None:
        began = self.now
        if "chat" in path:
            on_chunk(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        on_chunk(b": keep-alive\n\n")
        for number in range(body["max_tokens"]):
            self.now = began + TTFT + number * ITL
            text = {"delta": {"content": "a"}} if "chat" in path else {"text": "a"}
            on_chunk(_event({"choices": [text]}))
        on_chunk(b"data: [DONE]\n\n")


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def scripted(server: Any, **changes: Any) -> Generator:
    """Ready to send to it."""
    settings = replace(SETTINGS, **changes)
    generator = Generator(settings, "http://scripted", clock=lambda: server.now, client=server)
    generator.prepare()
    return generator


def run(url: str, count: int = 8, **changes: Any) -> Generator:
    """So many requests at once to a real server."""
    generator = Generator(replace(SETTINGS, **changes), url)
    generator.prepare()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda number: generator.send(number, 0.0), range(count)))
    return generator


def figures(generator: Generator) -> Summary:
    return summarise(generator.records)[ALL]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_measured_times_are_the_configured_ones(endpoint: str) -> None:
    server = Scripted()
    generator = scripted(server, endpoint=endpoint)
    for number in range(8):
        server.now = 0.0
        generator.send(number, 0.0)
    got = figures(generator)
    assert got.failures == 0
    whole = TTFT + 24 * ITL
    assert got.samples["ttft"] == pytest.approx([TTFT] * 8)
    assert got.samples["itl"] == pytest.approx([ITL] * 8 * 24)
    assert got.samples["tpot"] == pytest.approx([ITL] * 8)
    assert got.samples["latency"] == pytest.approx([whole] * 8)
    assert got.samples["tok_per_s_request"] == pytest.approx([25 / whole] * 8)
    # All eight at once: eight times the tokens in the time of one.
    assert got.tok_per_s == pytest.approx(8 * 25 / whole)


def test_budgets_are_sent_and_reported_by_label(start_mock: StartMock) -> None:
    records = run(
        start_mock(*TIMED), budgets="1.0:1,0.5:2,none:1", output_tokens=5, prompt_tokens=600
    ).records
    asked = sorted((one.label, (one.kv_cache or {})["budget"]) for one in records)
    assert asked == [("kv=0.5", 0.5)] * 4 + [("kv=1", 1.0)] * 2 + [("kv=none", 1.0)] * 2
    got = summarise(records)
    assert got["kv=1"].held == 1.0
    assert got["kv=0.5"].held == pytest.approx(0.5, abs=0.01)


def test_prompt_lengths_are_those_asked_for_in_the_servers_own_tokens(
    start_mock: StartMock,
) -> None:
    url = start_mock("--ttft-ms", "1", "--itl-ms", "1", "--chars-per-token", "7")
    lengths = [
        one.prompt_tokens for one in run(url, 16, prompt_jitter=0.2, output_tokens=2).records
    ]
    assert sum(lengths) / 16 == pytest.approx(400, rel=0.05)
    assert 310 < min(lengths) < 370
    assert 430 < max(lengths) < 490


def test_failures_are_counted_and_give_no_latencies(start_mock: StartMock) -> None:
    """Half are refused, the others break off half-way, after 12 tokens."""
    generator = run(start_mock(*BROKEN), 20)
    refused = [one for one in generator.records if one.error and "told to fail" in one.error]
    broken = [one for one in generator.records if one not in refused]
    assert 3 < len(refused) < 17
    assert all((one.error or "").startswith("HTTPStatusError: 500: ") for one in refused)
    assert {one.error for one in broken} == {"the stream ended without [DONE]"}
    assert {one.output_tokens for one in broken} == {12}
    got = figures(generator)
    assert got.error_rate == 1.0
    assert not any(got.samples.values())


def test_late_request_is_measured_from_when_it_was_due() -> None:
    record = scripted(Scripted(), output_tokens=2).send(0, -1.0)
    assert record.late == pytest.approx(1.0)
    assert record.ttft == pytest.approx(1.0 + TTFT)
    assert record.latency == pytest.approx(1.0 + TTFT + ITL)


def test_warm_up_is_sent_but_not_counted(start_mock: StartMock) -> None:
    generator = run(start_mock(*FAST), 1, warmup=3)
    assert len(generator.records) == 1
    with pytest.raises(HTTPStatusError, match="kv_budget"):
        run(start_mock(*FAST), 1, warmup=1, budgets="0.5", body='{"kv_budget": 1.5}')


def test_request_too_many_fails_without_being_sent() -> None:
    class Busy(Scripted):
        """Before a request is answered, the next one is due."""

        def stream(self, *_: Any, **__: Any) -> None:
            generator.send(generator.in_flight, 0.0)

    generator = scripted(Busy(), max_in_flight=3)
    generator.send(0, 0.0)
    assert generator.records[0].error == "not sent: 3 requests are unanswered"
    assert len(generator.records) == 4


def test_request_whose_user_is_killed_is_cut_and_no_failure() -> None:
    class Killed(Scripted):
        def stream(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    generator = scripted(Killed())
    with pytest.raises(KeyboardInterrupt):
        generator.send(0, 0.0)
    (record,) = generator.records
    assert record.cut
    assert record.error is None
    assert generator.in_flight == 0
