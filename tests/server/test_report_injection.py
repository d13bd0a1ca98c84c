# SPDX-License-Identifier: Apache-2.0
"""The report lands in the right place of a body or a stream, however the stream is cut."""

import json
from typing import Any

import pytest

from h2o_vllm.server.report_injection import EventCompleter, into_json

REPORT = {"budget": 0.2, "tokens_held": 32}
TEXT = 'says \\"finish_reason\\":\\"stop\\" and \\"choices\\":[] é\\n'


def event(payload: str) -> bytes:
    return f"data: {payload}\n\n".encode()


def token(text: str = "a", index: int = 0) -> bytes:
    choice = f'{{"index":{index},"text":"{text}","finish_reason":null}}'
    return event(f'{{"id":"x","choices":[{choice}]}}')


def last(index: int = 0) -> bytes:
    choice = f'{{"index":{index},"text":"z","finish_reason":"stop"}}'
    return event(f'{{"id":"x","choices":[{choice}]}}')


USAGE = event('{"id":"x","choices":[],"usage":{"total_tokens":5}}')
DONE = event("[DONE]")
ERROR = event('{"error":{"message":"engine","code":500}}')
COMMENT = b": keep-alive\n\n"
COMPLETED = b'event: response.completed\ndata: {"response":{"usage":{}},"type":"r"}\n\n'
MESSAGE_DELTA = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"output_tokens":5}}\n\n'
)
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def run(chunks: list[bytes], report: Any = REPORT) -> list[bytes]:
    splicer = EventCompleter(lambda: report)
    return [*map(splicer.feed, chunks), splicer.finish()]


def payloads(stream: bytes) -> list[Any]:
    lines = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


STREAMS = {
    "usage": [token(), token(TEXT), last(), USAGE, DONE],
    "finish": [token(), last(), DONE],
    "two choices": [token(), last(0), token("b", 1), last(1), DONE],
    "two choices, usage": [last(0), last(1), USAGE, DONE],
    "no DONE": [token(), last()],
    "comments": [COMMENT, token(), last(), COMMENT, USAGE, COMMENT, DONE],
    "responses": [b'event: response.created\ndata: {"response":{}}\n\n', COMPLETED],
    "messages": [
        b'event: message_start\ndata: {"type":"message_start"}\n\n',
        b'event: content_block_delta\ndata: {"delta":{"text":"event: message_delta"}}\n\n',
        MESSAGE_DELTA,
        MESSAGE_STOP,
    ],
}


@pytest.mark.parametrize("name", STREAMS)
def test_report_is_in_the_last_data_event_and_nowhere_else(name: str) -> None:
    chunks = STREAMS[name]
    got = payloads(b"".join(run(chunks)))
    sent = payloads(b"".join(chunks))
    # Of Anthropic's events the last says only that it is the last.
    target = got[-2] if name == "messages" else got[-1]
    target = target["response"] if name == "responses" else target
    assert target.pop("kv_cache") == REPORT
    assert got == sent


@pytest.mark.parametrize("name", STREAMS)
def test_result_does_not_depend_on_where_the_stream_is_cut(name: str) -> None:
    stream = b"".join(STREAMS[name])
    whole = b"".join(run([stream]))
    for size in (1, 2, 3, 7):
        assert b"".join(run([stream[i : i + size] for i in range(0, len(stream), size)])) == whole
    for cut in range(len(stream) + 1):
        assert b"".join(run([stream[:cut], stream[cut:]])) == whole


def test_events_pass_at_once_except_the_one_that_may_be_last() -> None:
    chunks = [token(), token(TEXT), last(0), token("b", 1), last(1), COMMENT, USAGE, DONE]
    out = run(chunks)
    # Also text that looks like a marker.
    assert out[:2] == chunks[:2]
    assert out[2:7] == [b"", chunks[2] + chunks[3], b"", COMMENT, chunks[4]]
    assert out[7].endswith(DONE)
    assert b"kv_cache" in out[7]


@pytest.mark.parametrize(
    "chunks",
    [[token(), ERROR, DONE], [last(), ERROR, DONE], [DONE], [b""], [b"data: x\n\n", DONE], [USAGE]],
)
@pytest.mark.parametrize("size", [1, 10_000])
def test_nothing_is_lost_or_added_without_a_report(chunks: list[bytes], size: int) -> None:
    stream = b"".join(chunks)
    cut = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert b"".join(run(cut, report=None)) == stream


def test_an_error_carries_no_report_and_a_cut_off_event_is_passed_at_the_end() -> None:
    stream = b"".join([last(), ERROR, DONE])
    assert b"".join(run([stream])) == stream
    assert b"".join(run([token(), b"data: {"])) == token() + b"data: {"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', b'{"a":1,"kv_cache":{"budget":0.2,"tokens_held":32}}'),
        (b'{"a": {"b": "}"} }\n', b'{"a": {"b": "}"},"kv_cache":{"budget":0.2,"tokens_held":32}}'),
        (b"{}", b'{"kv_cache":{"budget":0.2,"tokens_held":32}}'),
        (b"null", b"null"),
        (b"", b""),
        (b"[1]", b"[1]"),
        (b'"x"', b'"x"'),
    ],
)
def test_into_json(body: bytes, expected: bytes) -> None:
    assert into_json(body, REPORT) == expected
    assert into_json(body, None) == body
