# SPDX-License-Identifier: Apache-2.0
"""The load generator measures what the mock server was set to. Threads stand in for Locust's greenlets."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import socket
from pathlib import Path

import pytest

from loadtest.http.client import Client, HTTPStatusError
from loadtest.http.generator import Generator
from loadtest.http.options import LoadSettings
from loadtest.http.records import ALL, Summary, percentile, summarise
from tests.loadtest.conftest import BROKEN, FAST, ONE_PLACE, TIMED, StartMock

SETTINGS = LoadSettings(prompt_tokens=400, output_tokens=25, warmup=0)
TTFT, ITL = 0.150, 0.020


def run(url: str, count: int = 8, **changes: object) -> Generator:
    """``count`` requests at once."""
    generator = Generator(dataclasses.replace(SETTINGS, **changes), url)  # type: ignore[arg-type]
    generator.prepare()
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda number: generator.send(number, generator.now()), range(count)))
    return generator


def figures(generator: Generator) -> Summary:
    return summarise(generator.records)[ALL]


def near(value: float) -> object:
    """Never earlier than set, but for the clock; later by what a busy machine adds."""
    return pytest.approx(value * 1.12, rel=0.14)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_measured_times_are_the_configured_ones(start_mock: StartMock, endpoint: str) -> None:
    got = figures(run(start_mock(*TIMED), endpoint=endpoint))
    assert got.failures == 0
    assert percentile(got.samples["ttft"], 0.5) == near(TTFT)
    assert percentile(got.samples["itl"], 0.5) == near(ITL)
    assert percentile(got.samples["tpot"], 0.5) == near(ITL)
    whole = TTFT + 24 * ITL
    assert percentile(got.samples["latency"], 0.5) == near(whole)
    assert 25 / percentile(got.samples["tok_per_s_request"], 0.5) == near(whole)
    # All eight at once: eight times the tokens in the time of one.
    assert 8 * 25 / got.tok_per_s == near(whole)


def test_several_tokens_in_one_event_change_gaps_but_not_counts(start_mock: StartMock) -> None:
    got = figures(run(start_mock(*TIMED, "--tokens-per-event", "5"), count=4))
    assert got.output_tokens == 4 * 25
    assert percentile(got.samples["itl"], 0.5) == near(5 * ITL)
    assert len(got.samples["itl"]) == 4 * 4


def test_places_of_the_server_show_as_waiting(start_mock: StartMock) -> None:
    """One at a time: the first token of the second is a whole answer late."""
    got = figures(run(start_mock(*ONE_PLACE), count=2, output_tokens=10))
    first, last = (percentile(got.samples["ttft"], share) for share in (0, 1))
    assert first == near(TTFT)
    assert last - first == near(TTFT + 9 * ITL)


def test_budgets_are_sent_and_reported_by_label(start_mock: StartMock) -> None:
    records = run(start_mock(*TIMED), budgets="1.0:1,0.5:2,none:1", output_tokens=5).records
    asked = sorted((one.label, (one.kv_cache or {})["budget"]) for one in records)
    assert asked == [("kv=0.5", 0.5)] * 4 + [("kv=1", 1.0)] * 2 + [("kv=none", 1.0)] * 2
    got = summarise(records)
    assert got["kv=1"].held == 1.0
    assert got["kv=0.5"].held == pytest.approx(0.5, abs=0.08)


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


def test_late_request_is_measured_from_when_it_was_due(start_mock: StartMock) -> None:
    generator = Generator(dataclasses.replace(SETTINGS, output_tokens=2), start_mock(*TIMED))
    generator.prepare()
    record = generator.send(0, generator.now() - 1.0)
    assert record.late == pytest.approx(1.0, abs=0.1)
    assert record.ttft == pytest.approx(1.0 + TTFT, abs=0.1)


def test_warm_up_is_sent_but_not_counted(start_mock: StartMock) -> None:
    generator = run(start_mock(*FAST), 1, warmup=3)
    assert len(generator.records) == 1
    with pytest.raises(HTTPStatusError, match="kv_budget"):
        run(start_mock(*FAST), 1, warmup=1, budgets="1.5")


def test_request_too_many_fails_without_being_sent(start_mock: StartMock) -> None:
    records = run(start_mock(*TIMED), 4, max_in_flight=3, output_tokens=2).records
    assert [one.error for one in records if one.error] == ["not sent: 3 requests are unanswered"]


def test_server_that_is_not_there_is_an_error_not_a_hang() -> None:
    with pytest.raises(OSError, match="refused"):
        Generator(SETTINGS, "http://127.0.0.1:9").prepare()


def test_connection_is_used_again_also_after_a_refusal(start_mock: StartMock) -> None:
    client = Client(start_mock(*TIMED))
    for _ in range(3):
        assert client.get_json("/version") == {"version": "mock"}
    (kept,) = client._idle
    with pytest.raises(HTTPStatusError, match="404"):
        client.get_json("/nowhere")
    assert client.get_json("/version") == {"version": "mock"}
    assert kept not in client._idle
    # One that the server has closed meanwhile is replaced without a word.
    (kept,) = client._idle
    assert kept.sock is not None
    kept.sock.shutdown(socket.SHUT_RDWR)
    assert client.get_json("/version") == {"version": "mock"}


def test_file_of_prompts_is_taken_whole(start_mock: StartMock, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"article": "' + "x" * 700 + '"}\n')
    records = run(start_mock(*FAST), 2, prompts=str(path), prompt_tokens=0).records
    assert {one.prompt_tokens for one in records} == {100}
