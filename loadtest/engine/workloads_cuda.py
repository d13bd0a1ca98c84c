# SPDX-License-Identifier: Apache-2.0
"""What is measured on a GPU: the workloads of the CPU scaled up, on a 7-8B-shaped model of random weights.

Throughput does not depend on the weights' values, so the model is a configuration alone
(``load_format="dummy"``) and needs no network; prompts are random tokens.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.engine.workloads import Setting, Workload

__all__ = [
    "CUDA_SETTINGS",
    "CUDA_VARIANTS",
    "CUDA_WORKLOADS",
    "MODELS",
    "engine_options",
    "make_model",
    "prompts",
    "scaled",
    "scaled_pool",
]

BLOCK_SIZE = 16
"""vLLM's default on GPUs, and ours."""

CUDA_VARIANTS = ("stock", "h2o")
"""We change none of vLLM's defaults on GPUs: stock with our flags is stock."""

MAX_MODEL_LEN = 10_240
"""The same for all, so that one engine can serve several workloads."""

CUDA_SETTINGS = {
    # The KV-bound regime: about 42 requests of 2k + 1k, 14 of 8k + 1k.
    "tight": Setting(MAX_MODEL_LEN, pool_tokens=131_072),
    "ample": Setting(MAX_MODEL_LEN),
}

CUDA_WORKLOADS = {
    one.name: one
    for one in (
        Workload("2k-tight", "KV-bound, budget 0.2", 256, 2048, 1024, (0.2,), "tight"),
        Workload("8k-tight", "KV-bound, budget 0.2", 96, 8192, 1024, (0.2,), "tight"),
        Workload("2k-mixed", "half full, half 0.2", 256, 2048, 1024, (None, 0.2), "tight"),
        Workload("2k-ample", "no memory pressure, budget 0.2", 64, 2048, 1024, (0.2,)),
        Workload("8k-ample", "no memory pressure, budget 0.2", 32, 8192, 1024, (0.2,)),
        Workload("2k-idle", "no request has a budget", 64, 2048, 1024, (None,)),
    )
}

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    # Llama-3.1-8B's shape: G = 4, D = 128.
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    # Llama-2-7B's shape, without grouped queries: what the R-KV numbers are for.
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    # For rehearsals on machines without a GPU.
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}


def make_model(shape: str, folder: Path) -> Path:
    """Write the configuration of ``MODELS[shape]``; returns its directory."""
    path = folder / f"h2o-bench-{shape}"
    path.mkdir(parents=True, exist_ok=True)
    config = {**_LLAMA, **MODELS[shape], "max_position_embeddings": 131072}
    (path / "config.json").write_text(json.dumps(config))
    return path


def engine_options(setting: Setting) -> dict[str, Any]:
    """Engine arguments, our switch not included; the same for both variants."""
    return {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": setting.max_model_len,
        "max_num_seqs": 256,
        "seed": 0,
    } | setting.pool(BLOCK_SIZE)


def prompts(workload: Workload, vocab_size: int) -> list[list[int]]:
    """Random tokens, which share no beginning."""
    rnd = random.Random(0)
    lengths = workload.prompt_lengths()
    return [[rnd.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def scaled(workload: Workload, by: float) -> Workload:
    """The same traffic with shorter texts and fewer requests, to rehearse."""
    if by == 1:
        return workload
    return replace(
        workload,
        requests=max(4, round(workload.requests * by)),
        prompt_tokens=max(64, round(workload.prompt_tokens * by)),
        output_tokens=max(24, round(workload.output_tokens * by)),
    )


def scaled_pool(setting: Setting, by: float) -> Setting:
    """The pool that :func:`scaled` traffic finds as tight."""
    if setting.pool_tokens is None:
        return setting
    return replace(setting, pool_tokens=max(12_288, round(setting.pool_tokens * by)))
