# SPDX-License-Identifier: Apache-2.0
"""Refusals at start on every device. Any process that checks options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from h2o_vllm.blocks.counts.settling import SettlingSchedule, schedule_of
from h2o_vllm.config.keys import CONFIG_KEY, METRICS_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_fields import ROLE_WORDS
from h2o_vllm.config.resolve import resolve_for
from h2o_vllm.engine.support.architectures import NAMED
from h2o_vllm.engine.support.drafts import asks_for_exact, drafter_has_kv
from h2o_vllm.engine.support.refusal import Refusal, evictable_kv_heads, is_one_of, own_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULER_CLS = "h2o_vllm.engine.core.scheduler.H2OScheduler"
"""Path of our scheduler class, for ``--scheduler-cls``."""

STOCK = "Serve it with: vllm serve"


def is_our_scheduler(scheduler_cls: type) -> bool:
    """Whether it is our scheduler or a subclass. By name: the scheduler imports this package."""
    paths = (f"{base.__module__}.{base.__qualname__}" for base in scheduler_cls.__mro__)
    return SCHEDULER_CLS in paths


def _heads(config: VllmConfig) -> int:
    # Models without attention have none.
    return max(1, evictable_kv_heads(config.model_config))


def _uneven_ranks(config: VllmConfig) -> bool:
    ranks = config.parallel_config.tensor_parallel_size
    return ranks > 1 and ranks > _heads(config) and ranks % _heads(config) != 0


def _traces_elsewhere(config: VllmConfig) -> bool:
    parallel = config.parallel_config
    several = parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
    return bool(own_option(config, "kv_trace")) and (
        several or config.device_config.device_type != "cpu"
    )


def _too_small_reason(config: VllmConfig) -> str:
    """Why segments of the server's default have too few blocks; empty: they have enough, or none settle."""
    options = (config.additional_config or {}).get(CONFIG_KEY, {})
    if not options.get("kv_settle_tokens"):
        return ""
    budget = resolve_for(H2OConfig.from_mapping(options), None, 1)
    schedule = schedule_of(budget, config.cache_config.block_size, 1)
    return schedule.too_small_reason if isinstance(schedule, SettlingSchedule) else ""


def _where_kv_is_shared(
    what: str, asked: Callable[[VllmConfig], bool], path: str, value: object
) -> Refusal:
    """A row for models with layers that read the KV of an earlier one (Gemma 3n, Gemma 4 E)."""
    name = "num_kv_shared_layers"
    return Refusal(
        f"{what} where layers share KV",
        "not tested with evictions",
        lambda config: getattr(config.model_config.hf_text_config, name, 0) > 0 and asked(config),
        {"model_config.hf_text_config": SimpleNamespace(**{name: 2}), path: value},
    )


def _moves_kv(config: VllmConfig) -> bool:
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    return transfer is not None and not (
        transfer.kv_connector == "H2OConnector"
        and config.device_config.device_type == "cpu"
        and parallel.tensor_parallel_size * parallel.pipeline_parallel_size == 1
        and config.cache_config.enable_prefix_caching
        and not (config.lora_config or config.kv_events_config or drafter_has_kv(config))
    )


ROWS = (
    Refusal(
        f"additional_config without the key {CONFIG_KEY!r}",
        "the engine would have no budgets",
        lambda config: CONFIG_KEY not in (config.additional_config or {}),
        {"additional_config": {}},
        "Build the arguments with h2o_vllm.engine_args()",
    ),
    Refusal(
        "kv_protect 'system' or 'task' without h2o-serve",
        "only a server knows the roles of a chat",
        lambda config: (
            own_option(config, "kv_protect") in ROLE_WORDS
            and not (config.additional_config or {}).get(METRICS_KEY)
        ),
        {"additional_config": {CONFIG_KEY: {"kv_protect": "system"}}},
    ),
    Refusal(
        "--scheduler-cls",
        "our scheduler decides on evictions",
        lambda config: not is_our_scheduler(config.scheduler_config.get_scheduler_cls()),
        {"scheduler_config.get_scheduler_cls": lambda: object},
        "Leave the option out",
        value=lambda config: config.scheduler_config.get_scheduler_cls(),
    ),
    Refusal(
        "--worker-cls",
        "our worker compacts tokens",
        lambda config: not str(config.parallel_config.worker_cls).startswith("h2o_vllm."),
        {"parallel_config.worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
        "Leave the option out",
        value=lambda config: config.parallel_config.worker_cls,
    ),
    Refusal(
        "--kv-offloading-size, and --kv-transfer-config, except H2OConnector on CPUs, in one worker, without "
        "--no-enable-prefix-caching, --enable-lora, KV cache events and drafters with KV of their own",
        "connectors move KV by position, and evictions change blocks; the rest is not tested",
        _moves_kv,
        {"kv_transfer_config": SimpleNamespace(kv_connector="OffloadingConnector")},
        "Leave the options out, or serve with: vllm serve",
    ),
    Refusal(
        "models without attention",
        "nothing to evict: states never grow",
        lambda config: config.model_config.is_attention_free,
        {"model_config.is_attention_free": True},
        STOCK,
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        "heads share one latent vector per token, so none keeps its own set",
        lambda config: config.model_config.use_mla,
        {"model_config.use_mla": True},
        STOCK,
    ),
    *(
        Refusal(
            kind,
            reason,
            partial(is_one_of, names=names),
            {"model_config.architectures": [names[0]]},
            STOCK,
        )
        for kind, reason, names in NAMED
    ),
    Refusal(
        "encoder-decoder models",
        "cross attention is not scored",
        lambda config: config.model_config.is_encoder_decoder,
        {"model_config.is_encoder_decoder": True},
        STOCK,
    ),
    Refusal(
        "pooling models",
        "they generate nothing to evict for",
        lambda config: config.model_config.runner_type == "pooling",
        {"model_config.runner_type": "pooling"},
        STOCK,
    ),
    Refusal(
        "--kv-sharing-fast-prefill",
        "layers that read the KV of others skip the prompt, whose attention would be missing",
        lambda config: config.cache_config.kv_sharing_fast_prefill,
        {"cache_config.kv_sharing_fast_prefill": True},
        "Leave the option out",
    ),
    _where_kv_is_shared(
        "drafters with KV of their own", drafter_has_kv, "speculative_config.method", "eagle"
    ),
    _where_kv_is_shared(
        "--kv-exact and --kv-exact-drafts",
        asks_for_exact,
        "additional_config",
        {CONFIG_KEY: {"kv_exact": True}},
    ),
    _where_kv_is_shared(
        "--pipeline-parallel-size above 1",
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
        "parallel_config.pipeline_parallel_size",
        2,
    ),
    Refusal(
        "--kv-trace on GPUs, or with --tensor-parallel-size or --pipeline-parallel-size above 1",
        "one worker on CPUs, with all layers and KV heads, makes a trace",
        _traces_elsewhere,
        {
            "additional_config": {CONFIG_KEY: {"kv_trace": True}},
            "parallel_config.tensor_parallel_size": 2,
        },
        "Leave the option out",
    ),
    Refusal(
        "--kv-settle-tokens whose segments have too few blocks for --kv-budget",
        "whole blocks of a segment stay: more than twice its share, or all",
        lambda config: bool(_too_small_reason(config)),
        {
            "additional_config": {
                CONFIG_KEY: {"kv_settle_tokens": 128, "kv_budget": 0.2, "kv_policy": "key"}
            },
            "cache_config.block_size": 32,
        },
        value=lambda config: f"({_too_small_reason(config)})",
    ),
    Refusal(
        "--tensor-parallel-size that is no divisor and no multiple of the KV heads",
        "vLLM gives each head to as many ranks",
        _uneven_ranks,
        {"parallel_config.tensor_parallel_size": 3},
        "Choose a multiple or a divisor",
        value=lambda config: (
            f"({config.parallel_config.tensor_parallel_size} for {_heads(config)} KV heads)"
        ),
    ),
    Refusal(
        "context parallelism",
        "each process would rank only its part of a head's tokens",
        lambda config: (
            config.parallel_config.decode_context_parallel_size > 1
            or config.parallel_config.prefill_context_parallel_size > 1
        ),
        {"parallel_config.decode_context_parallel_size": 2},
    ),
    Refusal(
        "--data-parallel-size above 1 for a mixture of experts",
        "its engines run in lockstep; not tested with evictions",
        # The engines of a dense model are independent of each other: the value here is 1.
        lambda config: config.parallel_config.data_parallel_size > 1,
        {"parallel_config.data_parallel_size": 2},
        "Use --tensor-parallel-size, or replicas",
    ),
)
