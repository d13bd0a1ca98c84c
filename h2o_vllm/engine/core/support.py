# SPDX-License-Identifier: Apache-2.0
"""Refuses unsupported configurations at start-up, with the reason. Engine core, workers and API server.

Without these checks an unsupported combination would silently evict nothing, or silently corrupt answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from h2o_vllm.config.keys import CONFIG_KEY, METRICS_KEY
from h2o_vllm.config.options import H2OConfig
from h2o_vllm.config.request_fields import ROLE_WORDS
from h2o_vllm.engine.core.architectures import (
    CONVOLUTIONS,
    DELTA_NETS,
    MAMBA2,
    refusal_by_name,
)
from h2o_vllm.engine.core.drafting import (
    WITHOUT_KV,
    asks_for_exact,
    drafter_has_kv,
    drafting_refusals,
)
from h2o_vllm.engine.core.heads import evictable_kv_heads, scores_not_because
from h2o_vllm.engine.core.sharing import sharing_refusals
from h2o_vllm.engine.core.version import check_vllm_version
from h2o_vllm.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["check_supported", "config_of"]

SCHEDULER_CLS = "h2o_vllm.engine.core.scheduler.H2OScheduler"
"""Path of our scheduler's class, as ``--scheduler-cls`` takes it."""

_NO_EXACT = "vLLM's model runner for GPUs takes no drafter but its own"

_NO_OP = "no kernel computes it on GPUs yet"

DELTA_NET_DTYPES = ("bfloat16",)
"""What ``cpu_gdn_attention_core`` (0.32) computes in on CPU; its kernels take nothing else."""

_KV_DTYPES = ("auto", "bfloat16", "float16", "float32")


def check_supported(config: VllmConfig) -> None:
    """Check the whole engine configuration.

    Raises:
        ConfigError: an option is not supported. The message names the first one, and the reason.
    """
    device = config.device_config.device_type
    if device not in _BY_DEVICE:
        raise ConfigError(
            f"h2o_vllm serves on {', '.join(_BY_DEVICE)}; vLLM chose the device {device!r}"
        )
    check_vllm_version(device)
    for refused, reason in [*_everywhere(config), *_BY_DEVICE[device](config)]:
        if refused:
            raise ConfigError(f"h2o_vllm cannot work with {reason}")
    # The defaults, before weights are loaded.
    config_of(config)


def config_of(config: VllmConfig) -> H2OConfig:
    """Our configuration, with the limits of this engine (its fields ``..._because``).

    Raises:
        ConfigError: it is invalid, or its defaults need what this engine cannot do.
    """
    ours = H2OConfig.from_mapping((config.additional_config or {})[CONFIG_KEY])
    device = config.device_config.device_type
    return replace(
        ours,
        kv_scores_not_because=scores_not_because(config),
        kv_heads_equal_because=_equal_heads_because(config),
        kv_exact_not_because="" if device == "cpu" else _NO_EXACT,
        kv_ops_because="" if device == "cpu" else _NO_OP,
    )


def _equal_heads_because(config: VllmConfig) -> str:
    if config.parallel_config.tensor_parallel_size > 1:
        return "with tensor parallelism a rank has only some of the heads"
    return ""


def _protects_roles_without_a_server(additional_config: Mapping[str, Any]) -> bool:
    ours = additional_config.get(CONFIG_KEY, {})
    return ours.get("kv_protect") in ROLE_WORDS and not additional_config.get(METRICS_KEY)


def _option(config: VllmConfig, name: str) -> Any:
    return (config.additional_config or {}).get(CONFIG_KEY, {}).get(name)


def _is_of(config: VllmConfig, kind: frozenset[str]) -> bool:
    return not kind.isdisjoint(config.model_config.architectures)


def _rotates_images(config: VllmConfig) -> bool:
    """Whether prompts may hold images with tokens that are rotated by place in the image (M-RoPE)."""
    model, media = config.model_config, config.model_config.multimodal_config
    if not model.uses_mrope or media is None:
        return False
    return any(media.get_limit_per_prompt(kind) > 0 for kind in ("image", "video", "audio"))


def _everywhere(config: VllmConfig) -> list[tuple[bool, str]]:
    model, parallel = config.model_config, config.parallel_config
    by_name = refusal_by_name(model.architectures)
    scheduler_cls = config.scheduler_config.get_scheduler_cls()
    ranks = parallel.tensor_parallel_size
    # Models without attention have none.
    heads = max(1, evictable_kv_heads(model)) if ranks > 1 else 1
    return [
        (
            CONFIG_KEY not in (config.additional_config or {}),
            f"additional_config without the key {CONFIG_KEY!r}: build the arguments with "
            "h2o_vllm.engine_args()",
        ),
        (
            _protects_roles_without_a_server(config.additional_config or {}),
            "kv_protect 'system' or 'task' without h2o-serve: only a server knows the roles of a chat",
        ),
        (
            not _is_ours(scheduler_cls),
            f"--scheduler-cls {scheduler_cls}: our scheduler decides on evictions",
        ),
        (
            not str(parallel.worker_cls).startswith("h2o_vllm."),
            f"--worker-cls {parallel.worker_cls}: our worker compacts tokens",
        ),
        (
            model.is_attention_free,
            "models without attention: their states never grow, so there is nothing to evict. Serve them "
            "with: vllm serve",
        ),
        (
            model.use_mla,
            "multi-head latent attention (MLA): heads share one latent vector per token, so no "
            "head can keep its own set of tokens. Serve it with: vllm serve",
        ),
        (bool(by_name), by_name),
        (
            config.cache_config.kv_sharing_fast_prefill,
            "--kv-sharing-fast-prefill: layers that read the KV of others skip the prompt, and tokens would "
            "be ranked without their attention",
        ),
        (
            ranks > heads and ranks % heads != 0,
            f"--tensor-parallel-size {ranks} for {heads} KV heads: vLLM gives each head to as many ranks. "
            "Choose a multiple or a divisor",
        ),
        (model.is_encoder_decoder, "encoder-decoder models: cross attention is not scored"),
        (model.runner_type == "pooling", "pooling models: they generate nothing to evict for"),
        (
            # ``--kv-offloading-size`` sets it as well.
            config.kv_transfer_config is not None,
            "--kv-transfer-config and --kv-offloading-size: a KV connector moves KV by position, and an "
            "eviction leaves other tokens there",
        ),
        *sharing_refusals(config),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism: it splits one head's tokens among processes, and each would rank only "
            "its own part",
        ),
        (
            # The engines of a dense model are independent of each other: the value here is 1.
            parallel.data_parallel_size > 1,
            "--data-parallel-size above 1 for a mixture of experts, whose engines run in lockstep: by the "
            "code evictions fit in, but no two such engines have run with them; use --tensor-parallel-size, "
            "or replicas",
        ),
    ]


def _other_kv(config: VllmConfig, more: tuple[str, ...], why: str) -> tuple[bool, str]:
    """Refuse other KV dtypes than those of 16 and 32 bits and those in ``more``."""
    name = config.cache_config.cache_dtype
    return (
        name not in (*_KV_DTYPES, *more),
        f"--kv-cache-dtype {name} {why}. Eviction at --kv-cache-dtype auto saves more memory than 8 bits "
        "at any budget below 0.5",
    )


def _on_cpu(config: VllmConfig) -> list[tuple[bool, str]]:
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    return [
        (
            config.use_v2_model_runner,
            "model runner V2 on CPU: unset VLLM_USE_V2_MODEL_RUNNER",
        ),
        _other_kv(config, (), "on CPU: our kernels there read KV of 16 and 32 bits"),
        *drafting_refusals(config),
        (
            drafter_has_kv(config) and _rotates_images(config),
            "drafters with KV of their own for images, videos and sound with several positions per token "
            f"(M-RoPE): not tested with evictions. Drafters of these methods are: {', '.join(WITHOUT_KV)}",
        ),
        (
            # ``RotaryEmbedding.forward_cpu`` (0.32) reads queries [T, H, D] as if they were [T, H * D].
            _is_of(config, CONVOLUTIONS)
            and "all" in config.compilation_config.custom_ops
            and "-rotary_embedding" not in config.compilation_config.custom_ops,
            "--enforce-eager with LFM2 on CPU: vLLM 0.32 then rotates its keys wrongly, with and without "
            "budgets. Leave the option out",
        ),
        (
            # ``mamba_chunk_scan_combined_varlen`` (0.32) on CPU returns no states within a prompt.
            _is_of(config, MAMBA2) and bool(config.cache_config.enable_prefix_caching),
            "prefix caching for Mamba2 layers on CPU: it ends the engine of vLLM 0.32 at the first long "
            "prompt, with and without budgets. Add --no-enable-prefix-caching",
        ),
        (
            _is_of(config, DELTA_NETS) and dtype not in DELTA_NET_DTYPES,
            f"gated delta networks in {dtype} on CPU: vLLM 0.32 has kernels for bfloat16 alone, and its "
            "engine ends at the first prompt, with and without budgets. Set --dtype bfloat16",
        ),
    ]


def _on_cuda(config: VllmConfig) -> list[tuple[bool, str]]:
    """Options that our GPU adaptors do not implement, or that are not tested with them."""
    from vllm import envs

    from h2o_vllm.kernels.triton.checks import HEAD_SIZES

    model, parallel = config.model_config, config.parallel_config
    attention = config.attention_config
    # The full-attention layers of Gemma 4 have another head size than its windows.
    head_size = getattr(model.hf_text_config, "global_head_dim", None) or model.get_head_size()
    backend = getattr(attention.backend, "name", None)
    return [
        (
            config.speculative_config is not None,
            f"speculative decoding by {getattr(config.speculative_config, 'method', None)!r} on GPUs: our "
            "kernels there score every query, also those of rejected drafts. On CPUs it is served",
        ),
        _other_kv(
            config,
            ("fp8", "fp8_e4m3"),
            "on GPUs: the only 8-bit KV that is scored is fp8 (e4m3) with one scale per layer; scales per "
            "token would have to move with their tokens",
        ),
        (
            _option(config, "kv_full_kernel") == "h2o",
            "--kv-full-kernel h2o on GPUs: there vLLM's own kernels serve all requests that are not scored",
        ),
        (
            bool(_option(config, "kv_trace")) and parallel.pipeline_parallel_size > 1,
            "--kv-trace in a pipeline of GPUs: each stage knows only what its own layers lose, and only the "
            "last one is asked",
        ),
        (
            asks_for_exact(config),
            f"--kv-exact and --kv-exact-drafts on GPUs: {_NO_EXACT}. On CPUs they are served",
        ),
        (
            not config.use_v2_model_runner,
            "model runner V1 on GPUs: unset VLLM_USE_V2_MODEL_RUNNER. If it is unset, vLLM chose V1 "
            "for this model or option",
        ),
        (
            backend != "CUSTOM",
            f"--attention-backend {backend}: only our backend scores tokens; it is built on "
            "FlashAttention or Triton. Leave the option out",
        ),
        (
            bool(attention.backend_per_kind),
            f"attention_config.backend_per_kind {attention.backend_per_kind}: full attention must use "
            "our backend. Leave the option out",
        ),
        (
            head_size not in HEAD_SIZES,
            f"head size {head_size} on GPUs: our kernels are tested with "
            f"{', '.join(map(str, HEAD_SIZES))}",
        ),
        (
            model.is_hybrid,
            "hybrid models on GPUs, which mix attention with state-space or convolution layers: there vLLM "
            "does not pass the requests of a batch to attention. Serve it with: vllm serve",
        ),
        (
            _rotates_images(config),
            "images, videos and sound with several positions per token (M-RoPE) on GPUs: not tested with "
            "evictions there; on CPUs they are served. Serve text alone with --language-model-only, or "
            "everything with: vllm serve",
        ),
        (
            parallel.use_ubatching,
            "microbatching (--enable-dbo): parts of a batch attend at the same time, and our decode kernel "
            "has one workspace",
        ),
        (
            envs.VLLM_BATCH_INVARIANT,
            "VLLM_BATCH_INVARIANT: how our decode kernel splits a row depends on the batch",
        ),
        (
            model.is_mm_prefix_lm,
            "bidirectional attention over images (prefix LM): prompts are scored as causal",
        ),
        (
            model.rswa_window is not None,
            "reference sliding-window attention (R-SWA): it frees blocks by a rule of its own",
        ),
    ]


_BY_DEVICE = {"cpu": _on_cpu, "cuda": _on_cuda}


def _is_ours(scheduler_cls: type) -> bool:
    # By name: the scheduler imports this module.
    paths = (f"{base.__module__}.{base.__qualname__}" for base in scheduler_cls.__mro__)
    return SCHEDULER_CLS in paths
