# SPDX-License-Identifier: Apache-2.0
"""What cannot be repeated is a 400 with the numbers, before the engine hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server import repeating

LENGTH = 1024


class Client:
    """An engine client that answers with what it was asked."""

    def generate(self, prompt: Any, sampling_params: SamplingParams) -> str:
        del prompt, sampling_params
        return "answer"


def serving(blocks: int = 200, seats: int = 8, **model: Any) -> tuple[Any, list[str]]:
    client, refusals = Client(), []
    options = {
        "max_model_len": LENGTH, "is_encoder_decoder": False, "skip_tokenizer_init": False,
        "hf_text_config": SimpleNamespace(), **model,
    }  # fmt: skip
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(**options),
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=16),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=seats, watermark=0.0),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    for _ in range(2):
        repeating.install(client, engine, H2OConfig(kv_min_tokens=16), refusals.append)
    return client, refusals


def ask(client: Any, prompt: Any, max_tokens: int = 40, **fields: Any) -> Any:
    asked = {"kv_policy": "repeat", "kv_budget": 0.2} | fields
    params = SamplingParams(max_tokens=max_tokens, extra_args=asked)
    if isinstance(prompt, int):
        prompt = {"prompt_token_ids": [7] * prompt}
    return client.generate(prompt, params)


def test_what_fits_passes() -> None:
    client, refusals = serving()
    for length in (1, 300, LENGTH - 1 - 256):
        assert ask(client, length) == "answer"
    assert ask(client, 1000, max_tokens=8) == "answer", "it never evicts"
    assert ask(client, 1000, kv_policy="h2o") == "answer"
    assert ask(client, 1000, kv_budget=1.0) == "answer"
    assert not refusals


@pytest.mark.parametrize(
    ("prompt", "server", "words"),
    [
        (
            768,
            {},
            "prompt of 768 tokens: behind it, its repetition needs 256 more, within the model's",
        ),
        (300, {"blocks": 36}, "and 560 tokens of KV"),
        (300, {"seats": 1}, "--max-num-seqs is 1"),
        (300, {"skip_tokenizer_init": True}, "--skip-tokenizer-init"),
        (300, {"hf_text_config": SimpleNamespace(layer_types=["sliding_attention"])}, "windows"),
        ({"prompt_token_ids": [7] * 300, "mm_kwargs": {"image": []}}, {}, "images"),
    ],
)
def test_what_does_not_is_a_400(prompt: Any, server: dict[str, Any], words: str) -> None:
    client, refusals = serving(**server)
    with pytest.raises(VLLMValidationError) as caught:
        ask(client, prompt)
    assert words in str(caught.value) and "kv_policy must be another one" in str(caught.value)
    assert caught.value.parameter == "kv_policy"
    assert refusals == ["value"]
