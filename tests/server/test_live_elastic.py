# SPDX-License-Identifier: Apache-2.0
"""``h2o-serve --kv-elastic`` as its clients see it: lossless for one, squeezed where many want memory.

What the model says does not matter here: it is a tiny one of random weights.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.live_server import KEY, MODEL, LiveServer, live_server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLIENTS = 5


@pytest.fixture(scope="module")
def server(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--kv-budget", "0.2", "--kv-elastic", "--kv-min-tokens", "64"]
    # 39 blocks of 32: three of these clients with full KV, or all of them at their floors.
    options += ["--num-gpu-blocks-override", "40", "--max-model-len", "1024"]
    with live_server(log, *tiny, *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


def answer(client: openai.OpenAI, number: int, **fields: Any) -> Any:
    prompt = [1000 + 7 * number + 3 * i for i in range(300)]
    n = fields.pop("n", 1)
    # Greedy answers would all be the same, and vLLM refuses to give several.
    options = {"max_tokens": 80, "temperature": int(n > 1), "n": n}
    body = fields | {"ignore_eos": True}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=body, **options)


def test_one_client_loses_nothing(client: openai.OpenAI) -> None:
    report = answer(client, 0).kv_cache
    assert report["elastic"] is True and report["squeezed_at"] is None
    assert report["tokens_evicted"] == 0 and report["budget"] == 0.2
    fixed = answer(client, 0, kv_elastic=False).kv_cache
    assert fixed["elastic"] is False and fixed["squeezed_at"] == 300


def test_many_clients_are_told_where_they_were_squeezed_and_can_repeat_it(
    server: LiveServer, client: openai.OpenAI
) -> None:
    names = ["elastic_answers", "lossless_answers", "squeezed_requests", "squeezed_blocks"]
    names = [f"h2o:{name}_total" for name in (*names, "preemptions_avoided")]
    before = dict(zip(names, server.metrics(*names), strict=True))
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda number: answer(client, number), range(CLIENTS)))
    points = [one.kv_cache["squeezed_at"] for one in answers]
    squeezed = [number for number, at in enumerate(points) if at is not None]
    assert squeezed and None in points
    for number in squeezed:
        at = points[number]
        assert at >= 300 and answers[number].kv_cache["tokens_evicted"] > 0
        alone = answer(client, number, kv_evict_from=at)
        assert alone.choices[0].text == answers[number].choices[0].text
        assert alone.kv_cache["squeezed_at"] == at and alone.kv_cache["elastic"] is False
    server.wait_for("h2o:elastic_answers_total", before["h2o:elastic_answers_total"] + CLIENTS)
    after = dict(zip(names, server.metrics(*names), strict=True))
    grown = {name: after[name] - before[name] for name in names}
    assert grown["h2o:lossless_answers_total"] == points.count(None)
    assert grown["h2o:squeezed_requests_total"] == len(squeezed)
    assert grown["h2o:squeezed_blocks_total"] >= len(squeezed)
    assert server.metric("vllm:num_preemptions_total") == 0


def test_several_answers_report_one_by_one(client: openai.OpenAI) -> None:
    report = answer(client, 20, n=2, kv_elastic=True).kv_cache
    assert report["elastic"] and report["squeezed_at"] is None
    assert [one["squeezed_at"] for one in report["sequences"]] == [None, None]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_elastic": "yes"}, "kv_elastic must be true or false, got 'yes'"),
        ({"kv_evict_from": 0}, "kv_evict_from must be an integer in [1, 2147483647], got 0"),
        (
            {"kv_elastic": True, "kv_evict_from": 300},
            "kv_evict_from must be left out when kv_elastic is true, got 300",
        ),
    ],
)
def test_bad_fields_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        answer(client, 0, **fields)
    assert message in str(caught.value)


def test_the_server_says_that_it_is_elastic(server: LiveServer) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    config = httpx.get(f"{server.url}/plugins/h2o/config", headers=headers).json()
    assert config["defaults"]["kv_elastic"] is True and config["defaults"]["kv_budget"] == 0.2
    assert config["limits"]["kv_elastic_admission"] == "squeeze"
