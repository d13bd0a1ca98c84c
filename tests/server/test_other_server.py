# SPDX-License-Identifier: Apache-2.0
"""What ``h2o-serve`` serves under a plain uvicorn: budgets, reports, refusals, chats with pictures.

The model is of random weights.
"""

import base64
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

import h2o_vllm
from loadtest.common.servers import Server
from tests.families.image_models import PILLOW_ALONE, picture, save_image_model
from tests.published import PUBLISHED_OPTIONS
from tests.server.live_server import ENVIRONMENT, MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SEEN = 100
"""Tokens of a picture."""
WORDS = [f"t{7 + i * 11 % 400}" for i in range(200)]
MODULE = """
from h2o_vllm.server.asgi import H2OApplication

app = H2OApplication(*{options!r})
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A uvicorn, which knows nothing of vLLM."""
    folder, model = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("llava")
    save_image_model("llava", str(model))
    options = ["--model", str(model), "--served-model-name", MODEL, "--max-model-len", "2048"]
    options += ["--dtype", "float32", "--enforce-eager", *PUBLISHED_OPTIONS]
    (folder / "application.py").write_text(MODULE.format(options=options))
    program = [sys.executable, "-m", "uvicorn", "application:app", "--app-dir", str(folder)]
    paths = [str(PILLOW_ALONE), ENVIRONMENT.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with Server(program, [], folder / "log", name="uvicorn", environment=environment) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_another_server_serves_budgets_reports_and_refusals(server: Server) -> None:
    body = {"model": MODEL, "prompt": [100] * 400, "max_tokens": 8, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        answer = client.post("/v1/completions", json=body | {"kv_budget": 0.5})
        assert answer.headers["x-h2o-vllm"] == h2o_vllm.__version__
        assert answer.json()["kv_cache"]["tokens_evicted"] > 0
        refused = client.post("/v1/completions", json=body | {"kv_budget": 7})
        assert refused.status_code == 400 and "kv_budget" in refused.json()["error"]["message"]
        assert client.get("/plugins/h2o/config").status_code == 200
        assert "h2o:budget_rejections_total{" in client.get("/metrics").text


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(client: openai.OpenAI, *images: Image.Image, **fields: Any) -> Any:
    """A system message of 50 words, then 100 with the pictures between, then 50."""
    parts: list[Any] = [{"type": "text", "text": " ".join(WORDS[50:150])}]
    parts += [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in images]
    parts += [{"type": "text", "text": " ".join(WORDS[150:])}]
    return client.chat.completions.create(
        model=MODEL, temperature=0, max_tokens=40, logprobs=True, extra_body=fields | {"ignore_eos": True},
        messages=[
            {"role": "system", "content": " ".join(WORDS[:50])}, {"role": "user", "content": parts},
        ],
    )  # fmt: skip


def words_of(answer: Any) -> list[str]:
    return [entry.token for entry in answer.choices[0].logprobs.content]


def test_a_budget_counts_a_pictures_tokens(client: openai.OpenAI) -> None:
    one, other = picture(1), picture(2)
    text = ask(client).usage.prompt_tokens
    whole = ask(client, one, other)
    assert whole.usage.prompt_tokens == text + 2 * SEEN
    answer = ask(client, one, other, kv_budget=0.3)
    report = answer.kv_cache
    seen = report["tokens_seen"]
    assert seen == text + 2 * SEEN + 39 == report["tokens_held"] + report["tokens_evicted"]
    assert 0.3 * seen <= report["tokens_held"] < 0.3 * seen + report["block_size"]
    # The first word comes before the first eviction.
    assert words_of(answer)[0] == words_of(whole)[0] and words_of(answer) != words_of(whole)


def test_what_is_protected_is_shared_by_requests_with_the_same_picture_alone(
    client: openai.OpenAI,
) -> None:
    asked = {"kv_budget": 0.3, "kv_protect": "prompt"}
    first = ask(client, picture(3), **asked)
    again, other = ask(client, picture(3), **asked), ask(client, picture(4), **asked)
    assert words_of(again) == words_of(first) != words_of(other)
    assert first.kv_cache["tokens_protected"] > 100 + SEEN
    assert again.kv_cache["tokens_cached"] > 150 >= other.kv_cache["tokens_cached"] > 0
    system = ask(client, picture(3), **asked | {"kv_protect": "system"})
    assert 0 < system.kv_cache["tokens_protected"] <= 50 + system.kv_cache["block_size"]
