# SPDX-License-Identifier: Apache-2.0
"""What clients see of a server whose pool is smaller than its model; the last test kills its engine."""

import base64
import concurrent.futures
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file

from tests.server.deaths import dies_in_public, processes
from tests.server.live_server import MODEL, LiveServer, live_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK, BLOCKS, BOUND, WINDOW = 32, 40, 256, 256
POOL = BLOCK * (BLOCKS - 1)
"""Tokens, for a model of 2,048: vLLM alone would not start. Three of the clients below fit with full KV."""
CLIENTS = 5
WHOLE: dict[str, Any] = {"kv_prefill_tokens": 0}
ELASTIC = WHOLE | {"kv_elastic": True}
SETTLES = WHOLE | {"kv_budget": 0.5, "kv_policy": "later", "kv_settle_tokens": WINDOW}


@pytest.fixture(scope="module")
def server(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--kv-budget", "0.2", "--kv-prefill-tokens", str(BOUND), "--kv-min-tokens", "64"]
    options += ["--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK)]
    options += ["--enable-prompt-embeds"]
    with live_server(log, *tiny, *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


def answer(
    client: openai.OpenAI, length: int, max_tokens: int = 40, number: int = 0, **fields: Any
) -> Any:
    prompt = [1000 + 7 * number + 3 * i for i in range(length)]
    n = fields.pop("n", 1)
    # Greedy answers would all be the same, and vLLM refuses to give several.
    options = {"max_tokens": max_tokens, "temperature": int(n > 1), "n": n}
    body = fields | {"ignore_eos": True}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=body, **options)


# Bounded prompts


def test_a_prompt_longer_than_the_pool_is_answered(client: openai.OpenAI) -> None:
    length = POOL + 600
    response = answer(client, length)
    assert response.usage.prompt_tokens == length
    report = response.kv_cache
    assert report["prefill_tokens"] == report["squeezed_at"] == BOUND
    assert report["peak_blocks"] * BLOCK <= POOL
    assert report["tokens_seen"] == length + 39


def test_what_cannot_be_held_is_a_400_with_the_numbers(client: openai.OpenAI) -> None:
    """What cannot: ``test_admission.py``."""
    with pytest.raises(openai.BadRequestError) as caught:
        answer(client, 1400, 8, **WHOLE)
    message = caught.value.message
    assert f"at most {POOL} tokens of KV" in message
    assert "a prompt of 1400 tokens and an answer of up to 8" in message
    assert caught.value.param == "kv_prefill_tokens"


def test_embeddings_are_what_their_tokens_are(client: openai.OpenAI, tiny_model: Path) -> None:
    (weights,) = tiny_model.glob("*.safetensors")
    rows = load_file(weights)["model.embed_tokens.weight"].float()

    def by_rows(length: int, **fields: Any) -> Any:
        file = io.BytesIO()
        torch.save(rows[[1000 + 3 * i for i in range(length)]], file)
        encoded = base64.b64encode(file.getvalue()).decode()
        body = fields | {"ignore_eos": True, "prompt_embeds": encoded}
        return client.completions.create(
            model=MODEL, prompt=None, max_tokens=40, temperature=0, extra_body=body
        )

    length = POOL + 100
    said, expected = by_rows(length), answer(client, length)
    assert said.choices[0].text == expected.choices[0].text
    assert said.kv_cache | {"tokens_cached": 0} == expected.kv_cache | {"tokens_cached": 0}
    with pytest.raises(openai.BadRequestError, match=f"a prompt of {length} tokens"):
        by_rows(length, **WHOLE)


# Elastic requests


def test_one_elastic_client_loses_nothing(client: openai.OpenAI) -> None:
    report = answer(client, 300, 80, **ELASTIC).kv_cache
    assert report["elastic"] is True and report["squeezed_at"] is None
    assert report["tokens_evicted"] == 0 and report["budget"] == 0.2
    several = answer(client, 300, 80, 20, n=2, **ELASTIC).kv_cache
    assert several["elastic"] and several["squeezed_at"] is None
    assert [one["squeezed_at"] for one in several["sequences"]] == [None, None]


def test_many_clients_are_told_where_they_were_squeezed_and_can_repeat_it(
    server: LiveServer, client: openai.OpenAI
) -> None:
    names = ["elastic_answers", "lossless_answers", "squeezed_requests", "squeezed_blocks"]
    names = [f"h2o:{name}_total" for name in names]
    # Those before this one have said so.
    server.wait_for("vllm:num_requests_running", 0)
    before = dict(zip(names, server.metrics(*names), strict=True))
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(
            pool.map(lambda number: answer(client, 300, 80, number, **ELASTIC), range(CLIENTS))
        )
    points = [one.kv_cache["squeezed_at"] for one in answers]
    squeezed = [number for number, at in enumerate(points) if at is not None]
    assert squeezed and None in points
    for number in squeezed:
        at = points[number]
        assert at >= 300 and answers[number].kv_cache["tokens_evicted"] > 0
        alone = answer(client, 300, 80, number, **WHOLE, kv_evict_from=at)
        assert alone.choices[0].text == answers[number].choices[0].text
        assert alone.kv_cache["squeezed_at"] == at and alone.kv_cache["elastic"] is False
    server.wait_for("h2o:elastic_answers_total", before["h2o:elastic_answers_total"] + CLIENTS)
    after = dict(zip(names, server.metrics(*names), strict=True))
    grown = {name: after[name] - before[name] for name in names}
    assert grown["h2o:lossless_answers_total"] == points.count(None)
    assert grown["h2o:squeezed_requests_total"] == len(squeezed)
    assert grown["h2o:squeezed_blocks_total"] >= len(squeezed)
    assert server.metric("vllm:num_preemptions_total") == 0


# Chats whose segments settle


def chat(client: openai.OpenAI, turns: int, first: str) -> list[Any]:
    """The responses of a conversation. Each turn sends all earlier messages."""
    messages: list[Any] = [{"role": "system", "content": first}]
    responses = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"Question {number}: " + "why is it so? " * 20})
        responses.append(
            client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=24, temperature=0,
                extra_body=SETTLES | {"ignore_eos": True},
            )
        )  # fmt: skip
        # Not the model's answer: its text may have other tokens when it is sent back.
        messages.append({"role": "assistant", "content": f"Because of {number}."})
    return responses


def test_turns_and_a_second_client_read_what_has_settled(
    server: LiveServer, client: openai.OpenAI
) -> None:
    responses = chat(client, 6, "You are helpful.")
    reports = [response.kv_cache for response in responses]
    cached = [report["tokens_cached"] for report in reports]
    assert cached == sorted(cached) and cached[0] == 0
    assert cached[-1] > WINDOW + 64, "read behind a segment that has settled"
    assert all(report["settle_tokens"] == WINDOW for report in reports)
    last = reports[-1]
    assert 0 < last["tokens_evicted"] == last["tokens_settled"] // 2
    assert last["tokens_cached"] >= 0.6 * responses[-1].usage.prompt_tokens
    again = chat(client, 4, "You are helpful.")
    assert again[-1].kv_cache["tokens_cached"] > WINDOW
    for one, other in zip(responses, again, strict=False):
        assert one.choices[0].message.content == other.choices[0].message.content
    assert server.metric("h2o:settled_segments_total") > 0


# Its end


def test_killed_engine_core_ends_the_server_with_an_error(server: LiveServer) -> None:
    dies_in_public(server, processes(server, "EngineCore")[0])
