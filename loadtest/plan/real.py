# SPDX-License-Identifier: Apache-2.0
"""The real scheduler and block manager without a model: planners play the model themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from h2o_vllm.engine.core.scheduler import H2OScheduler

__all__ = ["TOKEN", "answer", "bare_config", "dense_scheduler", "make_request", "make_scheduler"]

TOKEN = 7
"""What the model always answers."""


def bare_config(block_size: int, length: int, max_seqs: int, max_batched: int) -> VllmConfig:
    """An engine's configuration for sequences of at most ``length`` tokens, with the prefix cache."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    from h2o_vllm.models import default_model_dir
    from h2o_vllm.plugin import engine_args, register

    register()
    # Blocks are kept for next turns by the clock, and time is simulated here.
    args = engine_args(kv_turn_seconds=0.0)
    # Of the embedded model the scheduler sees nothing but how long a sequence may be.
    model = ModelConfig(
        model=str(default_model_dir()), max_model_len=length, dtype="bfloat16",
        hf_overrides={"max_position_embeddings": length},
    )  # fmt: skip
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
        parallel_config=ParallelConfig(worker_cls=args["worker_cls"]),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs, max_num_batched_tokens=max_batched, max_model_len=length,
            enable_chunked_prefill=True, is_encoder_decoder=False, scheduler_cls=args["scheduler_cls"],
        ),
        device_config=DeviceConfig("cpu"),
        additional_config=args["additional_config"],
    )  # fmt: skip


def make_scheduler(config: VllmConfig, kv_cache: KVCacheConfig) -> H2OScheduler:
    """A scheduler for a pool."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.structured_output import StructuredOutputManager

    from h2o_vllm.engine.core.scheduler import H2OScheduler

    init_none_hash(sha256)
    return H2OScheduler(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=config.cache_config.block_size,
    )


def dense_scheduler(config: VllmConfig, pool_tokens: int) -> H2OScheduler:
    """The same for a model all of whose layers have full attention.

    Args:
        pool_tokens: for which there is KV memory; how much that is does not matter here.
    """
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from h2o_vllm.blocks.spec import H2OAttentionSpec

    cache = config.cache_config
    spec = H2OAttentionSpec(
        block_size=cache.block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    # One more: the null block holds nothing.
    cache.num_gpu_blocks = pool_tokens // cache.block_size + 1
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return make_scheduler(config, KVCacheConfig(cache.num_gpu_blocks, [], groups))


def make_request(
    name: str,
    prompt: list[int],
    answer_tokens: int,
    fields: dict[str, Any],
    block_size: int,
    known: Sequence[BlockHash] = (),
) -> Request:
    """A request whose answer has so many tokens.

    Args:
        fields: what it asks of us.
        known: hashes of its first blocks, as far as they have been computed.
    """
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hash_rest = get_request_block_hasher(block_size, sha256)

    def hashed(request: Request) -> list[BlockHash]:
        if not request.block_hashes:
            request.block_hashes.extend(known)
        return hash_rest(request)

    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(
            max_tokens=answer_tokens, ignore_eos=True, extra_args=fields
        ),
        pooling_params=None,
        block_hasher=hashed,
    )


def answer(scheduler: H2OScheduler, output: SchedulerOutput) -> None:
    """Play the model for a step."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[one].is_prefill_chunk else [TOKEN] for one in ids]
    result = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={one: place for place, one in enumerate(ids)},
        sampled_token_ids=sampled,
    )
    scheduler.update_from_output(output, result)
