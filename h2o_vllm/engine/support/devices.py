# SPDX-License-Identifier: Apache-2.0
"""Refusals at start on CPUs, and on GPUs. Any process that checks options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from h2o_vllm.config.keys import CONFIG_KEY
from h2o_vllm.engine.support.architectures import CONVOLUTIONS, DELTA_NETS, MAMBA2
from h2o_vllm.engine.support.drafts import asks_for_exact
from h2o_vllm.engine.support.everywhere import STOCK
from h2o_vllm.engine.support.refusal import Refusal, is_one_of, own_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KV_DTYPES = {
    "cpu": ("auto", "bfloat16", "float16", "float32"),
    "cuda": ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"),
}
NO_EXACT_ON_GPUS = "vLLM's model runner for GPUs takes no drafter but its own"
_EIGHT_BITS = "A budget below 0.5 at --kv-cache-dtype auto saves more memory than 8 bits"
_NO_OPTION = "Leave the option out"


def _kv_dtype(config: VllmConfig) -> str:
    return config.cache_config.cache_dtype


def _head_size(config: VllmConfig) -> int:
    model = config.model_config
    # The full-attention layers of Gemma 4 have another head size than its windows.
    return getattr(model.hf_text_config, "global_head_dim", None) or model.get_head_size()


def _other_head_size(config: VllmConfig) -> bool:
    from h2o_vllm.kernels.triton.checks import HEAD_SIZES

    return _head_size(config) not in HEAD_SIZES


def _batch_invariant(_: VllmConfig) -> bool:
    from vllm import envs

    return envs.VLLM_BATCH_INVARIANT


ON_CPU = (
    Refusal(
        "VLLM_USE_V2_MODEL_RUNNER=1",
        "our worker on CPUs is built on model runner V1",
        lambda config: config.use_v2_model_runner,
        {"use_v2_model_runner": True},
        "Unset it",
    ),
    Refusal(
        "--kv-cache-dtype of 8 or 4 bits",
        "our kernels on CPUs read KV of 16 and 32 bits",
        lambda config: _kv_dtype(config) not in KV_DTYPES["cpu"],
        {"cache_config.cache_dtype": "fp8"},
        _EIGHT_BITS,
        value=lambda config: f"({_kv_dtype(config)})",
    ),
    Refusal(
        "--enforce-eager with LFM2",
        # ``RotaryEmbedding.forward_cpu`` (0.32) reads queries [T, H, D] as if they were [T, H * D].
        "vLLM 0.32 then rotates its keys wrongly, also without budgets",
        lambda config: (
            is_one_of(config, CONVOLUTIONS)
            and "all" in config.compilation_config.custom_ops
            and "-rotary_embedding" not in config.compilation_config.custom_ops
        ),
        {
            "model_config.architectures": [min(CONVOLUTIONS)],
            "compilation_config.custom_ops": ["all"],
        },
        _NO_OPTION,
    ),
    Refusal(
        "prefix caching for Mamba2 layers",
        # ``mamba_chunk_scan_combined_varlen`` (0.32) on CPU returns no states within a prompt.
        "it ends vLLM 0.32's engine at the first long prompt, also without budgets",
        lambda config: (
            is_one_of(config, MAMBA2) and bool(config.cache_config.enable_prefix_caching)
        ),
        {
            "model_config.architectures": [min(MAMBA2)],
            "cache_config.enable_prefix_caching": True,
        },
        "Add --no-enable-prefix-caching",
    ),
    Refusal(
        "gated delta networks in another type than bfloat16",
        # ``cpu_gdn_attention_core`` (0.32).
        "vLLM 0.32 has no kernel for it",
        lambda config: (
            is_one_of(config, DELTA_NETS) and str(config.model_config.dtype) != "torch.bfloat16"
        ),
        {
            "model_config.architectures": [min(DELTA_NETS)],
            "model_config.dtype": "torch.float32",
        },
        "Set --dtype bfloat16",
        value=lambda config: f"({str(config.model_config.dtype).removeprefix('torch.')})",
    ),
)

ON_CUDA = (
    Refusal(
        "--kv-cache-dtype of 8 or 4 bits other than fp8 (e4m3)",
        "scales per token would have to move with their tokens",
        lambda config: _kv_dtype(config) not in KV_DTYPES["cuda"],
        {"cache_config.cache_dtype": "fp8_e5m2"},
        _EIGHT_BITS,
        value=lambda config: f"({_kv_dtype(config)})",
    ),
    Refusal(
        "--kv-full-kernel h2o",
        "vLLM's kernels serve all requests that are not scored there",
        lambda config: own_option(config, "kv_full_kernel") == "h2o",
        {"additional_config": {CONFIG_KEY: {"kv_full_kernel": "h2o"}}},
        _NO_OPTION,
    ),
    Refusal(
        "--kv-exact and --kv-exact-drafts",
        NO_EXACT_ON_GPUS,
        asks_for_exact,
        {"additional_config": {CONFIG_KEY: {"kv_exact_drafts": 2}}},
        "On CPUs they are served",
    ),
    Refusal(
        "model runner V1",
        "our adaptors for GPUs are built on V2",
        lambda config: not config.use_v2_model_runner,
        {"use_v2_model_runner": False},
        "Unset VLLM_USE_V2_MODEL_RUNNER. If it is unset, vLLM chose V1 for this model or option",
    ),
    Refusal(
        "--attention-backend",
        "only our backend scores tokens",
        lambda config: getattr(config.attention_config.backend, "name", None) != "CUSTOM",
        {"attention_config.backend": SimpleNamespace(name="FLASHINFER")},
        _NO_OPTION,
        value=lambda config: getattr(config.attention_config.backend, "name", None),
    ),
    Refusal(
        "attention_config.backend_per_kind",
        "only our backend scores tokens",
        lambda config: bool(config.attention_config.backend_per_kind),
        {"attention_config.backend_per_kind": {"full_attention": "TRITON_ATTN"}},
        _NO_OPTION,
    ),
    Refusal(
        "other head sizes than 64, 80, 96, 128, 256",
        "the kernels are tested with these",
        _other_head_size,
        {"model_config.get_head_size": lambda: 72},
        STOCK,
        value=lambda config: f"({_head_size(config)})",
    ),
    Refusal(
        "--enable-dbo",
        "parts of a batch attend at once, and our decode kernel has one workspace",
        lambda config: config.parallel_config.use_ubatching,
        {"parallel_config.use_ubatching": True},
        _NO_OPTION,
    ),
    Refusal(
        "VLLM_BATCH_INVARIANT=1",
        "how our decode kernel splits a row depends on the batch",
        _batch_invariant,
        {"env.VLLM_BATCH_INVARIANT": "1"},
        "Unset it",
    ),
    Refusal(
        "bidirectional attention over images (prefix LM)",
        "prompts are scored as causal",
        lambda config: config.model_config.is_mm_prefix_lm,
        {"model_config.is_mm_prefix_lm": True},
        STOCK,
    ),
    Refusal(
        "reference sliding-window attention (R-SWA)",
        "it frees blocks by a rule of its own",
        lambda config: config.model_config.rswa_window is not None,
        {"model_config.rswa_window": 128},
        STOCK,
    ),
)
