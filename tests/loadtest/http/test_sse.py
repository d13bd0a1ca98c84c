# SPDX-License-Identifier: Apache-2.0
"""The parser gives the same events wherever a stream is cut, and those the standard asks for."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.http.sse import Event, Parser

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=12)
LINE = st.one_of(
    TEXT.map(lambda text: f"data: {text}"),
    TEXT.map(lambda text: f"data:{text}"),
    TEXT.map(lambda text: f": {text}"),
    TEXT.map(lambda text: f"event: {text}"),
    TEXT.map(lambda text: f"id: {text}"),
    st.sampled_from(
        ["", "", "data", "retry: 10", "no colon", "data: [DONE]", 'data: {"a": "é🙂"}']
    ),
)
ENDINGS = st.sampled_from(["\n", "\r", "\r\n"])


def run(chunks: list[bytes]) -> list[Event]:
    parser = Parser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def by_the_book(stream: bytes) -> list[Event]:
    """The standard's algorithm over the whole text, line by line."""
    text = stream.decode(errors="replace").removeprefix("\ufeff")
    events, data, name = [], "", ""
    for line in re.split("\r\n|\n|\r", text)[:-1]:
        if line == "":
            if data:
                events.append(Event(data.removesuffix("\n"), name or "message"))
            data, name = "", ""
        elif line.startswith(":"):
            continue
        else:
            field, colon, value = line.partition(":")
            value = value.removeprefix(" ") if colon else ""
            if field == "event":
                name = value
            elif field == "data":
                data += value + "\n"
    return events


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in at), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.tuples(LINE, ENDINGS)), st.lists(st.integers(0, 10_000), max_size=20))
def test_a_stream_cut_anywhere_gives_the_events_of_the_standard(
    lines: list[tuple[str, str]], at: list[int]
) -> None:
    stream = "".join(line + ending for line, ending in lines).encode()
    assert run(cut(stream, at)) == by_the_book(stream)


@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=10))
def test_any_bytes_at_all_are_read_the_same_however_cut(stream: bytes, at: list[int]) -> None:
    assert run(cut(stream, at)) == run([stream])


@given(st.lists(st.lists(TEXT, min_size=1), max_size=5), ENDINGS)
def test_what_a_server_sends_is_what_comes_out_byte_by_byte(
    events: list[list[str]], ending: str
) -> None:
    stream = "".join(
        "".join(f"data: {line}{ending}" for line in lines) + f": keep-alive{ending}{ending}"
        for lines in events
    ).encode()
    got = run([stream[i : i + 1] for i in range(len(stream))])
    assert [event.data for event in got] == ["\n".join(lines) for lines in events]


@pytest.mark.parametrize("ending", ["\n", "\r", "\r\n"])
def test_character_cut_in_two_is_put_together(ending: str) -> None:
    stream = f"data: 日本 🙂{ending}{ending}".encode()
    for place in range(len(stream) + 1):
        assert run([stream[:place], stream[place:]]) == [Event("日本 🙂")]


def test_event_is_given_at_its_empty_line_not_later() -> None:
    parser = Parser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\r") == [Event("a")]
    # The LF belongs to the CR before it and is no empty line of its own.
    assert parser.feed(b"\ndata: b\n\n") == [Event("b")]


def test_comments_are_no_events() -> None:
    parser = Parser()
    assert parser.feed(b": keep-alive\n\n:\n\ndata: x\n\n") == [Event("x")]


def test_event_waits_for_its_empty_line() -> None:
    parser = Parser()
    assert parser.feed(b"data: whole\n\ndata: ha") == [Event("whole")]
    assert parser.feed(b"lf\n") == []
    assert parser.feed(b"\n") == [Event("half")]


def test_name_of_an_event_does_not_outlive_it() -> None:
    assert run([b"event: x\ndata: 1\n\ndata: 2\n\nevent: y\n\ndata: 3\n\n"]) == [
        Event("1", "x"),
        Event("2"),
        Event("3"),
    ]
