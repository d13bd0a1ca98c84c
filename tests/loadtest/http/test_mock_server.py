# SPDX-License-Identifier: Apache-2.0
"""The mock answers as an OpenAI server with our fields does, seen with the real ``openai`` client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from loadtest.http.mock_server import MockSettings, build_app
from tests.loadtest.conftest import FAST, StartMock
from tests.loadtest.http.virtual_time import VirtualServer


@pytest.fixture(scope="module")
def client(start_mock: StartMock) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{start_mock(*FAST)}/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mock"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_answer_usage_and_report(client: openai.OpenAI, chat: bool, stream: bool) -> None:
    options: dict[str, Any] = {"model": "mock", "max_tokens": 10, "extra_body": {"kv_budget": 0.5}}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    if chat:
        messages: Any = [{"role": "user", "content": "Hello"}]
        answer: Any = client.chat.completions.create(messages=messages, **options)
    else:
        answer = client.completions.create(prompt=[7] * 600, **options)
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    texts = [
        ((choice.delta if stream else choice.message).content if chat else choice.text) or ""
        for choice in choices
    ]
    assert len("".join(texts).split()) == 10
    assert "日本" in "".join(texts)
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 10
    report = chunks[-1].kv_cache
    assert report["budget"] == 0.5
    if not chat:
        assert chunks[-1].usage.prompt_tokens == 600
        # 609 seen, 305 may stay, so nine whole blocks of 32 go.
        assert (report["tokens_seen"], report["tokens_held"]) == (609, 609 - 9 * 32)


def test_length_is_the_models_own_unless_all_is_asked_for(client: openai.OpenAI) -> None:
    def length(**options: Any) -> int:
        answer = client.completions.create(model="mock", prompt="x", **options)
        assert answer.usage is not None
        return answer.usage.completion_tokens

    assert length(max_tokens=30) == 12
    assert length(max_tokens=4) == 4
    assert length(max_tokens=30, extra_body={"ignore_eos": True}) == 30


def test_bad_budget_is_a_400_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="mock", prompt="x", extra_body={"kv_budget": 1.5})
    body: Any = caught.value.body
    assert body["param"] == "kv_budget"


def test_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_keep_alives_are_sent_until_the_first_token() -> None:
    chunks: list[bytes] = []
    server = VirtualServer(build_app(MockSettings(ttft_ms=150, keep_alive_ms=40)))
    body = {"prompt": "x", "stream": True, "max_tokens": 2}
    server.stream("/v1/completions", body, chunks.append)
    comments, _, rest = b"".join(chunks).partition(b"data:")
    # At 40, 80 and 120 ms.
    assert comments.count(b": keep-alive\n\n") == 3
    assert b"keep-alive" not in rest
