# SPDX-License-Identifier: Apache-2.0
"""What the KV cache can never hold is a 400 with the numbers, before the engine hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server import fitting

LENGTH = 1024


class Client:
    """An engine client that answers with what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def generate(self, prompt: Any, sampling_params: SamplingParams) -> str:
        del sampling_params
        self.asked.append(len(prompt["prompt_token_ids"]))
        return "answer"


def serving(blocks: int, engines: int = 1, **options: Any) -> tuple[Client, list[str]]:
    """A client whose engines have so many blocks together, and the refusals that are counted."""
    client, refusals = Client(), []
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=LENGTH, is_encoder_decoder=False),
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=16),
        parallel_config=SimpleNamespace(data_parallel_size=engines),
    )
    config = H2OConfig(kv_min_tokens=16, **options)
    for _ in range(2):
        fitting.install(client, engine, config, refusals.append)
    return client, refusals


def ask(client: Any, prompt: int, max_tokens: int = 8, **fields: Any) -> Any:
    params = SamplingParams(max_tokens=max_tokens, extra_args=fields or None)
    return client.generate({"prompt_token_ids": [7] * prompt}, params)


def test_pool_of_the_models_length_needs_no_look() -> None:
    client, _ = serving(65)
    assert "generate" not in vars(client)
    client, _ = serving(130, engines=2)
    assert "generate" not in vars(client)


def test_what_fits_passes_and_what_does_not_is_a_400_with_the_numbers() -> None:
    client, refusals = serving(20, kv_budget=0.2, kv_prefill_tokens=256)
    assert ask(client, 900) == "answer"
    with pytest.raises(VLLMValidationError) as caught:
        ask(client, 900, kv_prefill_tokens=0)
    message = str(caught.value)
    assert "at most 304 tokens" in message and "prompt of 900" in message and "up to 8" in message
    assert caught.value.parameter == "kv_prefill_tokens"
    with pytest.raises(VLLMValidationError, match="up to 700 may hold"):
        ask(client, 100, max_tokens=700, kv_budget=1.0)
    assert ask(client, 100, max_tokens=100, kv_budget=1.0) == "answer"
    assert client.asked == [900, 100]
    assert refusals == ["value", "value"]


def test_engines_are_not_added_up() -> None:
    client, _ = serving(40, engines=2, kv_budget=0.2, kv_prefill_tokens=256)
    with pytest.raises(VLLMValidationError, match="at most 304 tokens"):
        ask(client, 900, kv_prefill_tokens=0)
