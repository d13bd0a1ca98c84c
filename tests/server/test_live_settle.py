# SPDX-License-Identifier: Apache-2.0
"""``h2o-serve --kv-settle-tokens`` as clients of chats see it, with a pool smaller than the model's length.

The model is tiny and has random weights: the text of its answers does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.live_server import KEY, MODEL, LiveServer, live_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WINDOW = 256


@pytest.fixture(scope="module")
def server(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--kv-budget", "0.5", "--kv-policy", "later", "--kv-settle-tokens", str(WINDOW)]
    # 1,500 tokens for a model of 2,048: vLLM alone would not start.
    options += ["--num-gpu-blocks-override", "48", "--block-size", "32"]
    with live_server(log, *tiny, *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


def turn(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    body = fields | {"ignore_eos": True}
    return client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0, extra_body=body
    )


def chat(client: openai.OpenAI, turns: int, first: str, **fields: Any) -> list[Any]:
    """The responses of a conversation. Each turn sends all earlier messages."""
    messages: list[Any] = [{"role": "system", "content": first}]
    responses = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"Question {number}: " + "why is it so? " * 20})
        response = turn(client, messages, **fields)
        # Not the model's answer: its text may have other tokens when it is sent back.
        messages.append({"role": "assistant", "content": f"Because of {number}."})
        responses.append(response)
    return responses


def test_six_turns_read_more_and_more_and_no_session_has_a_name(client: openai.OpenAI) -> None:
    responses = chat(client, 6, "You are helpful.")
    reports = [response.kv_cache for response in responses]
    cached = [report["tokens_cached"] for report in reports]
    assert cached == sorted(cached) and cached[0] == 0
    assert cached[-1] > WINDOW + 64, "read behind a segment that has settled"
    assert all(report["settle_tokens"] == WINDOW for report in reports)
    last = reports[-1]
    assert 0 < last["tokens_evicted"] == last["tokens_settled"] // 2
    seen = responses[-1].usage.prompt_tokens
    assert last["tokens_cached"] >= 0.6 * seen
    assert responses[-1].usage.prompt_tokens_details is None or (
        responses[-1].usage.prompt_tokens_details.cached_tokens == last["tokens_cached"]
    )


def test_a_branch_and_a_second_client_read_what_is_there(client: openai.OpenAI) -> None:
    one = chat(client, 4, "You are brief.")
    again = chat(client, 4, "You are brief.")
    assert [a.choices[0].message.content for a in one] == [
        b.choices[0].message.content for b in again
    ]
    assert again[-1].kv_cache["tokens_cached"] > WINDOW
    other = turn(client, [{"role": "system", "content": "You are brief."}], kv_settle_tokens=0)
    assert other.kv_cache["settle_tokens"] == 0


def test_what_cannot_settle_is_a_400_that_says_why(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        turn(client, [{"role": "user", "content": "x"}], kv_settle_tokens=512, kv_policy="h2o")
    assert caught.value.param == "kv_settle_tokens"
    assert "0 with kv_policy attention, which collects attention" in caught.value.message


def test_server_says_what_settles(server: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    config = httpx.get(f"{server.url}/plugins/h2o/config", headers=headers).json()
    assert config["defaults"]["kv_settle_tokens"] == WINDOW
    assert config["defaults"]["kv_heads"] == "equal"
    assert "kv_settle_tokens" in config["limits"]["request_fields"]
    assert server.metric("h2o:settled_segments_total") > 0
