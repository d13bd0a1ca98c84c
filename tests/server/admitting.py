# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests, and engine clients; what admission makes of them."""

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from h2o_vllm.blocks.counts.schedule import OtherGroup
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.server import admission
from h2o_vllm.server.protocol import RefusalError, admit
from h2o_vllm.server.routes import Rule

PATH = "/v1/completions"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "p", **fields}).encode()


def passed(config: H2OConfig, request: bytes, rule: Rule = Rule.LIFT) -> Any:
    return json.loads(admit(request, PATH, rule, config).body)


def refused(config: H2OConfig, request: bytes, rule: Rule = Rule.LIFT) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        admit(request, PATH, rule, config)
    return caught.value


class Client:
    """An engine client that notes the parameters of each call."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str = ""
    ) -> AsyncGenerator[Any, None]:
        self.seen.append(sampling_params.extra_args)
        yield SimpleNamespace(kv_transfer_params=None)


def serving(
    blocks: int = 1000,
    engines: int = 1,
    beside: tuple[OtherGroup, ...] = (),
    client: Any = None,
    length: int = 1024,
    **options: Any,
) -> tuple[Any, list[str]]:
    """A client whose engines have so many blocks together, and the refusals that are counted."""
    client, refusals = client or Client(), list[str]()
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length, is_encoder_decoder=False),
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=16),
        num_speculative_tokens=0,
        speculative_config=None,
        parallel_config=SimpleNamespace(data_parallel_size=engines),
    )
    config = H2OConfig(kv_min_tokens=16, **options)
    admission.install(client, engine, config, refusals.append, beside)
    return client, refusals


def embeddings(length: int) -> dict[str, Any]:
    return {"prompt_embeds": torch.zeros(length, 4)}


def ids(length: int) -> dict[str, Any]:
    return {"prompt_token_ids": [7] * length}


def ask(
    client: Any, prompt: Any, max_tokens: int = 8, n: int = 1, stop: Any = None, **fields: Any
) -> int:
    """How many outputs came."""
    params = SamplingParams(max_tokens=max_tokens, n=n, stop=stop, extra_args=fields or None)

    async def outputs() -> int:
        return len([one async for one in client.generate(prompt, params, "id")])

    return asyncio.run(outputs())
