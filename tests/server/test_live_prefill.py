# SPDX-License-Identifier: Apache-2.0
"""``h2o-serve --kv-prefill-tokens`` with a pool that is smaller than a prompt, as its clients see it.

What the model says does not matter here: it is a tiny one of random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.live_server import KEY, MODEL, LiveServer, live_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK, BLOCKS = 32, 17
POOL = BLOCK * (BLOCKS - 1)


@pytest.fixture(scope="module")
def server(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--kv-budget", "0.2", "--kv-prefill-tokens", "256"]
    # 512 tokens for a model of 2,048: vLLM alone would not start.
    options += ["--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK)]
    with live_server(log, *tiny, *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


def answer(client: openai.OpenAI, length: int, max_tokens: int = 40, **fields: Any) -> Any:
    prompt = [1000 + 3 * i for i in range(length)]
    body = fields | {"ignore_eos": True}
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=body
    )


def test_prompt_of_three_pools_is_answered(client: openai.OpenAI) -> None:
    response: Any = answer(client, 3 * POOL)
    assert response.usage.prompt_tokens == 3 * POOL
    report = response.kv_cache
    assert report["prefill_tokens"] == 256
    assert report["squeezed_at"] == 256
    assert report["peak_blocks"] * BLOCK <= POOL
    assert report["tokens_seen"] == 3 * POOL + 39


@pytest.mark.parametrize(
    ("length", "max_tokens", "fields"),
    [
        (600, 8, {"kv_prefill_tokens": 0}),
        (600, 8, {"kv_protect": "prompt"}),
        (100, 1000, {"kv_budget": 1.0}),
    ],
    ids=["whole", "protected", "long-answer"],
)
def test_what_cannot_be_held_is_a_400_with_the_numbers(
    client: openai.OpenAI, length: int, max_tokens: int, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        answer(client, length, max_tokens, **fields)
    assert f"at most {POOL} tokens of KV" in caught.value.message
    assert (
        f"a prompt of {length} tokens and an answer of up to {max_tokens}" in caught.value.message
    )
    assert caught.value.param == "kv_prefill_tokens"
    # And nobody else notices.
    assert answer(client, 100).usage.completion_tokens == 40


def test_server_says_what_it_bounds(server: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    config = httpx.get(f"{server.url}/plugins/h2o/config", headers=headers).json()
    assert config["defaults"]["kv_prefill_tokens"] == 256
    assert config["kv_cache"]["num_tokens"] == POOL
    assert "kv_prefill_tokens" in config["limits"]["request_fields"]
