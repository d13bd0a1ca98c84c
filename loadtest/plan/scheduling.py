# SPDX-License-Identifier: Apache-2.0
"""The real schedulers, vLLM's and ours, on a real pool of blocks, without a model or a device.

They need a model's configuration to exist, and look at none of its sizes: all get the same small Llama.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from h2o_vllm.blocks.spec import H2OAttentionSpec
from h2o_vllm.engine.scheduler import H2OScheduler
from h2o_vllm.plugin import engine_args, register

__all__ = ["EngineSettings", "make_request", "make_scheduler"]

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 64,
}  # fmt: skip


@dataclass(frozen=True)
class EngineSettings:
    """What decides about scheduling, named as vLLM's options.

    Attributes:
        ours: our scheduler and block manager, or vLLM's own.
        num_blocks: of the pool; one of them is the null block.
        pipelined: asynchronous scheduling: a step is decided on while the one before is computed.
        h2o: options of the server, as :func:`h2o_vllm.plugin.engine_args` takes them.
    """

    ours: bool
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pipelined: bool = False
    h2o: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pool_tokens(self) -> int:
        """Tokens the pool holds."""
        return (self.num_blocks - 1) * self.block_size


def make_scheduler(settings: EngineSettings) -> Any:
    """A scheduler with nothing to do.

    Raises:
        ConfigError: an option of ``settings.h2o`` is out of range.
    """
    ours: dict[str, Any] = {}
    worker: dict[str, Any] = {}
    if settings.ours:
        register()
        args = engine_args(**settings.h2o)
        ours = {"additional_config": args["additional_config"]}
        worker = {"worker_cls": args["worker_cls"]}
    config = VllmConfig(
        model_config=_model_config(settings.max_model_len),
        cache_config=CacheConfig(block_size=settings.block_size, enable_prefix_caching=True),
        parallel_config=ParallelConfig(**worker),
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=settings.pipelined,
            scheduler_cls=_class(settings),
        ),
        device_config=DeviceConfig("cpu"),
        **ours,
    )
    config.cache_config.num_gpu_blocks = settings.num_blocks
    kind = H2OAttentionSpec if settings.ours else FullAttentionSpec
    spec = kind(block_size=settings.block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return _class(settings)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=settings.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings.block_size,
        log_stats=False,
    )


def make_request(
    name: str, prompt_tokens: int, output_tokens: int, fields: Mapping[str, Any], block_size: int
) -> Any:
    """A request that ends after ``output_tokens``. Nobody shares its prompt."""
    params = SamplingParams(
        max_tokens=output_tokens, ignore_eos=True, detokenize=False, extra_args=dict(fields) or None
    )
    return Request(
        request_id=name,
        prompt_token_ids=[0] * prompt_tokens,
        sampling_params=params,
        pooling_params=None,
        block_hasher=_hasher(name, block_size),
    )


def _hasher(name: str, block_size: int) -> Callable[[Any], list[bytes]]:
    """Block hashes without hashing, as a preempted request finds its blocks by them."""

    def hashes(request: Any) -> list[bytes]:
        known = len(request.block_hashes)
        return [
            f"{name}/{block}".encode() for block in range(known, request.num_tokens // block_size)
        ]

    return hashes


def _class(settings: EngineSettings) -> Any:
    if settings.ours:
        return H2OScheduler
    return AsyncScheduler if settings.pipelined else Scheduler


def _model_config(max_model_len: int) -> ModelConfig:
    with TemporaryDirectory() as folder:
        config = {**_CONFIG, "max_position_embeddings": max_model_len}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return ModelConfig(
            model=folder,
            max_model_len=max_model_len,
            dtype="float32",
            skip_tokenizer_init=True,
            seed=0,
        )
