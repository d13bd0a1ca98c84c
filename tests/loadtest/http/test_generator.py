# SPDX-License-Identifier: Apache-2.0
"""The load generator measures what a server was set to. Threads stand in for Locust's greenlets.

The clock is the test's, so times are exact; over a connection: ``test_locust.py``.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loadtest.common.client import HTTPStatusError
from loadtest.http.generator import Generator
from loadtest.http.options import LoadSettings
from loadtest.http.records import ALL, Summary, summarise

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


def test_late_request_is_measured_from_when_it_was_due() -> None:
    record = scripted(Scripted(), output_tokens=2).send(0, -1.0)
    assert record.late == pytest.approx(1.0)
    assert record.ttft == pytest.approx(1.0 + TTFT)
    assert record.latency == pytest.approx(1.0 + TTFT + ITL)


def test_request_too_many_fails_without_being_sent() -> None:
    class Busy(Scripted):
        """Before a request is answered, the next one is due."""

        def stream(self, *_: Any, **__: Any) -> None:
            generator.send(generator.in_flight, 0.0)

    generator = scripted(Busy(), max_in_flight=3)
    generator.send(0, 0.0)
    assert generator.records[0].error == "not sent: 3 requests are unanswered"
    assert len(generator.records) == 4


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), HTTPStatusError(500, b"broken")])
def test_a_refused_request_is_a_failure_and_one_whose_user_is_killed_is_cut(
    ended: BaseException,
) -> None:
    class Ending(Scripted):
        def stream(self, *_: Any, **__: Any) -> None:
            raise ended

    generator, killed = scripted(Ending()), isinstance(ended, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) if killed else contextlib.nullcontext():
        generator.send(0, 0.0)
    (record,) = generator.records
    assert record.cut is killed
    assert record.error == (None if killed else "HTTPStatusError: 500: broken")
    assert generator.in_flight == 0
