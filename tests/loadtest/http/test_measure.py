# SPDX-License-Identifier: Apache-2.0
"""What is read from a stream: token times, usage, our report, and why it does not count."""

import json
from typing import Any

import pytest

from loadtest.http.measure import StreamMeter


def event(body: Any) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def text(value: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": value, "finish_reason": finish}]})


def delta(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5},
               "kv_cache": {"tokens_seen": 13, "tokens_held": 13}})  # fmt: skip
DONE = b"data: [DONE]\n\n"


def meter(*timed: tuple[float, bytes]) -> StreamMeter:
    result = StreamMeter()
    for now, chunk in timed:
        result.feed(chunk, now)
    return result


def test_completion_stream() -> None:
    got = meter((1, text("a")), (2, text("b")), (4, text("", "length")), (4, USAGE + DONE))
    assert got.times == [1, 2]
    assert got.gaps() == [1]
    assert got.output_tokens == 5
    assert got.finish == "length"
    assert got.kv_cache == {"tokens_seen": 13, "tokens_held": 13}
    assert got.problem is None


def test_role_of_a_chat_is_no_token_but_thoughts_and_tools_are() -> None:
    got = meter(
        (1, delta(role="assistant", content="")),
        (2, delta(reasoning="hm")),
        (3, delta(content="x")),
        (4, delta(tool_calls=[{"index": 0}])),
        (5, DONE),
    )
    assert got.times == [2, 3, 4]


def test_time_of_a_token_is_that_of_its_last_byte() -> None:
    whole = text("é")
    got = meter((1, whole[:20]), (2, whole[20:-1]), (3, whole[-1:]), (4, DONE))
    assert got.times == [3]


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (text("a"), "without [DONE]"),
        (DONE, "no text"),
        (
            text("a") + event({"error": {"message": "engine died", "code": 500}}) + DONE,
            "engine died",
        ),
        (text("a") + event({"error": "plain"}) + DONE, "plain"),
        (text("a") + b"data: {oops\n\n" + DONE, "not JSON"),
        (text("a") + b"data: 5\n\n" + DONE, "not an object"),
    ],
)
def test_stream_that_does_not_count_says_why(stream: bytes, problem: str) -> None:
    assert problem in (meter((1, stream)).problem or "")
